// The part of the Objective-C runtime that the metal-cpp headers use, for Linux (metal_runtime.cc).
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif
typedef struct objc_selector* SEL;
struct objc_object {
  void* isa;
};
typedef struct objc_class* Class;
void* objc_lookUpClass(const char* name);
void* objc_getProtocol(const char* name);
SEL sel_registerName(const char* name);
#ifdef __cplusplus
}
#endif
