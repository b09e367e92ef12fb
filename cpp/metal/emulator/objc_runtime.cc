#include "objc_runtime.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace jft::emu::objc {
namespace {

class Class : public Object {
 public:
  explicit Class(std::string n) : name(std::move(n)) {}
  Method method(const char* selector) override {
    auto found = methods.find(selector);
    if (found != methods.end()) return found->second;
    if (is(selector, "alloc")) return as_method(+[](Class* c, SEL) { return c->allocate(); });
    return Object::method(selector);
  }
  std::string name;
  Object* (*allocate)() = nullptr;
  std::map<std::string, Method> methods;
};

std::mutex& lock() {
  static std::mutex m;
  return m;
}

Class* class_named(const char* name) {
  static auto& classes = *new std::map<std::string, Class*>;
  std::lock_guard<std::mutex> hold(lock());
  Class*& c = classes[name];
  if (!c) c = new Class(name);
  return c;
}

thread_local std::vector<Object*> released_later;

class AutoreleasePool : public Object {
 public:
  AutoreleasePool() : first_(released_later.size()) {}
  ~AutoreleasePool() override {
    while (released_later.size() > first_) {
      Object* object = released_later.back();
      released_later.pop_back();
      object->release();
    }
  }
  Method method(const char* selector) override {
    if (is(selector, "drain")) return as_method(+[](AutoreleasePool* p, SEL) { p->release(); });
    return Object::method(selector);
  }

 private:
  std::size_t first_;
};

const bool registered = [] {
  register_class("NSAutoreleasePool", []() -> Object* { return new AutoreleasePool; });
  return true;
}();

}  // namespace

Method Object::method(const char* selector) {
  if (is(selector, "retain"))
    return as_method(+[](Object* o, SEL) {
      o->retain();
      return o;
    });
  if (is(selector, "release")) return as_method(+[](Object* o, SEL) { o->release(); });
  if (is(selector, "autorelease"))
    return as_method(+[](Object* o, SEL) { return objc::autorelease(o); });
  if (is(selector, "init")) return as_method(+[](Object* o, SEL) { return o; });
  if (is(selector, "respondsToSelector:")) {
    return as_method(
        +[](Object* o, SEL, const char* asked) { return o->method(asked) != nullptr; });
  }
  return nullptr;
}

Object* autorelease(Object* object) {
  released_later.push_back(object);
  return object;
}

void register_class(const char* name, Object* (*allocate)()) {
  class_named(name)->allocate = allocate;
}

void register_class_method(const char* name, const char* selector, Method method) {
  class_named(name)->methods[selector] = method;
}

extern "C" void* jft_objc_lookup(Object* self, const char* selector) {
  if (!self) return reinterpret_cast<void*>(+[]() -> void* { return nullptr; });  // messages to nil
  Method found = self->method(selector);
  if (!found) {
    std::fprintf(stderr, "emulated Metal: unrecognized selector %s\n", selector);
    std::abort();  // as Objective-C does
  }
  return reinterpret_cast<void*>(found);
}

extern "C" {

void* objc_lookUpClass(const char* name) { return class_named(name); }
void* objc_getProtocol(const char*) { return nullptr; }

SEL sel_registerName(const char* name) {
  static auto& names = *new std::set<std::string>;
  std::lock_guard<std::mutex> hold(lock());
  return reinterpret_cast<SEL>(const_cast<char*>(names.insert(name).first->c_str()));
}

// Finds the function and jumps to it with all arguments in place.
#if defined(__x86_64__)
asm(R"(
.text
.globl objc_msgSend
.globl objc_msgSend_fpret
.type objc_msgSend, @function
objc_msgSend:
objc_msgSend_fpret:
  pushq %rbp
  movq %rsp, %rbp
  pushq %rdi
  pushq %rsi
  pushq %rdx
  pushq %rcx
  pushq %r8
  pushq %r9
  subq $128, %rsp
  movups %xmm0, 0(%rsp)
  movups %xmm1, 16(%rsp)
  movups %xmm2, 32(%rsp)
  movups %xmm3, 48(%rsp)
  call jft_objc_lookup
  movups 0(%rsp), %xmm0
  movups 16(%rsp), %xmm1
  movups 32(%rsp), %xmm2
  movups 48(%rsp), %xmm3
  addq $128, %rsp
  popq %r9
  popq %r8
  popq %rcx
  popq %rdx
  popq %rsi
  popq %rdi
  popq %rbp
  jmp *%rax
.size objc_msgSend, .-objc_msgSend
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl objc_msgSend
.globl objc_msgSend_fpret
.type objc_msgSend, @function
objc_msgSend:
objc_msgSend_fpret:
  sub sp, sp, #144
  stp x0, x1, [sp, #0]
  stp x2, x3, [sp, #16]
  stp x4, x5, [sp, #32]
  stp x6, x7, [sp, #48]
  stp d0, d1, [sp, #64]
  stp d2, d3, [sp, #80]
  stp x8, x30, [sp, #96]
  bl jft_objc_lookup
  mov x9, x0
  ldp x0, x1, [sp, #0]
  ldp x2, x3, [sp, #16]
  ldp x4, x5, [sp, #32]
  ldp x6, x7, [sp, #48]
  ldp d0, d1, [sp, #64]
  ldp d2, d3, [sp, #80]
  ldp x8, x30, [sp, #96]
  add sp, sp, #144
  br x9
.size objc_msgSend, .-objc_msgSend
)");
#endif

// Blocks: metal-cpp defines functions that take them, the host code calls none.
void* _NSConcreteStackBlock[32];
void _Block_object_assign(void*, const void*, int) { std::abort(); }
void _Block_object_dispose(const void*, int) { std::abort(); }

void objc_msgSend_stret(void) { std::abort(); }  // the host code returns no large structs

}  // extern "C"

}  // namespace jft::emu::objc
