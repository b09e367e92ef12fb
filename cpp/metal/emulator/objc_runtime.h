// A tiny Objective-C runtime: objects that answer selectors with C functions. The metal-cpp headers
// turn every call into objc_msgSend(object, selector, arguments...), so this is all they need.
#pragma once

#include <objc/message.h>
#include <objc/runtime.h>

#include <atomic>
#include <cstring>

namespace jft::emu::objc {

using Method = void (*)();

class Object {
 public:
  virtual ~Object() = default;
  // The function for a selector; it takes (self, selector, arguments...). Null: not understood.
  virtual Method method(const char* selector);
  void retain() { ++references_; }
  void release() {
    if (--references_ == 0) delete this;
  }

 private:
  std::atomic<long> references_{1};
};

// `+alloc` of a class; the objects come out initialised, and `init` returns them.
void register_class(const char* name, Object* (*allocate)());
// Class methods beyond alloc.
void register_class_method(const char* name, const char* selector, Method method);

// Hands the object to the innermost autorelease pool of this thread.
Object* autorelease(Object* object);

template <typename R, typename... A>
Method as_method(R (*function)(A...)) {
  return reinterpret_cast<Method>(function);
}

inline bool is(const char* selector, const char* name) { return std::strcmp(selector, name) == 0; }

}  // namespace jft::emu::objc
