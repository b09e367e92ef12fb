// The Metal classes that the host code uses, executing in the emulator. Written against the
// selectors of the metal-cpp headers; the host code cannot tell the difference.
#include "metal_runtime.h"

#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "library.h"
#include "memory.h"
#include "objc_runtime.h"

namespace jft::emu {

DeviceSettings& settings() {
  static DeviceSettings s;
  return s;
}

namespace {

using objc::as_method;
using objc::autorelease;
using objc::is;
using objc::Method;
using UInteger = std::uint64_t;

std::mutex machine_lock;  // one dispatch at a time: function constants are globals of a library
std::vector<DispatchRecord> records;
std::vector<std::string> sources;

class String : public objc::Object {
 public:
  explicit String(std::string t = "") : text(std::move(t)) {}
  Method method(const char* s) override {
    if (is(s, "UTF8String"))
      return as_method(+[](String* self, SEL) { return self->text.c_str(); });
    return Object::method(s);
  }
  std::string text;
};

class Error : public objc::Object {
 public:
  explicit Error(std::string t) : text(std::move(t)) {}
  Method method(const char* s) override {
    if (is(s, "localizedDescription")) {
      return as_method(+[](Error* self, SEL) { return autorelease(new String(self->text)); });
    }
    return Object::method(s);
  }
  std::string text;
};

void set_error(objc::Object** out, const std::string& text) {
  if (out) *out = autorelease(new Error(text));
}

class CompileOptions : public objc::Object {
 public:
  Method method(const char* s) override {
    if (is(s, "setFastMathEnabled:")) {
      return as_method(+[](CompileOptions* self, SEL, bool on) { self->fast = on; });
    }
    if (is(s, "setLanguageVersion:")) {
      return as_method(+[](CompileOptions* self, SEL, UInteger v) { self->language = v; });
    }
    return Object::method(s);
  }
  bool fast = true;
  UInteger language = 0;
};

class ConstantTable : public objc::Object {
 public:
  Method method(const char* s) override {
    if (is(s, "setConstantValue:type:atIndex:")) {
      return as_method(+[](ConstantTable* self, SEL, const void* v, UInteger type, UInteger index) {
        const std::size_t bytes = type == 53 ? 1 : 4;  // MTLDataTypeBool; uint, int and float
        auto* p = static_cast<const char*>(v);
        self->values[static_cast<int>(index)].assign(p, p + bytes);
      });
    }
    return Object::method(s);
  }
  ConstantValues values;
};

class Function : public objc::Object {
 public:
  std::shared_ptr<Library> library;
  const Kernel* kernel = nullptr;
  ConstantValues constants;
};

class MetalLibrary : public objc::Object {
 public:
  Method method(const char* s) override {
    if (is(s, "newFunctionWithName:constantValues:error:")) {
      return as_method(+[](MetalLibrary* self, SEL, String* name, ConstantTable* constants,
                           objc::Object** error) -> objc::Object* {
        const Kernel* kernel = self->library->find(name->text);
        if (!kernel) {
          set_error(error, "no function named " + name->text);
          return nullptr;
        }
        std::lock_guard<std::mutex> hold(machine_lock);
        const std::string missing = self->library->set_constants(constants->values);
        if (!missing.empty()) {
          set_error(error, "function constant " + missing + " has no value");
          return nullptr;
        }
        auto* function = new Function;
        function->library = self->library;
        function->kernel = kernel;
        function->constants = constants->values;
        return function;
      });
    }
    return Object::method(s);
  }
  std::shared_ptr<Library> library;
};

class Pipeline : public objc::Object {
 public:
  Method method(const char* s) override {
    if (is(s, "maxTotalThreadsPerThreadgroup")) {
      return as_method(+[](Pipeline*, SEL) -> UInteger { return kMaxThreads; });
    }
    if (is(s, "threadExecutionWidth")) {
      return as_method(+[](Pipeline*, SEL) -> UInteger { return kSimdWidth; });
    }
    return Object::method(s);
  }
  std::shared_ptr<Library> library;
  const Kernel* kernel = nullptr;
  ConstantValues constants;
};

class Buffer : public objc::Object {
 public:
  explicit Buffer(std::size_t n)
      : owned(std::make_unique<GuardedMemory>(n)), data(owned->data()), bytes(n) {}
  Buffer(void* p, std::size_t n) : data(p), bytes(n) {}
  ~Buffer() override {
    if (owned && settings().memory_limit >= 0)
      settings().memory_limit += static_cast<std::int64_t>(bytes);
  }
  Method method(const char* s) override {
    if (is(s, "contents")) return as_method(+[](Buffer* self, SEL) { return self->data; });
    if (is(s, "length"))
      return as_method(+[](Buffer* self, SEL) -> UInteger { return self->bytes; });
    return Object::method(s);
  }
  std::unique_ptr<GuardedMemory> owned;
  void* data;
  std::size_t bytes;
};

struct Size {
  UInteger width, height, depth;
};

class CommandBuffer;

class Encoder : public objc::Object {
 public:
  explicit Encoder(CommandBuffer* b) : buffer(b) {}
  Method method(const char* s) override;
  void dispatch(const Size& grid, const Size& threads);

  CommandBuffer* buffer;
  Pipeline* pipeline = nullptr;
  std::map<int, Binding> bindings;
  std::map<int, std::size_t> threadgroup;
  std::map<int, std::shared_ptr<GuardedMemory>> bytes;
};

class CommandBuffer : public objc::Object {
 public:
  struct Work {
    std::shared_ptr<Library> library;
    const Kernel* kernel;
    ConstantValues constants;
    std::map<int, Binding> bindings;
    std::map<int, std::size_t> threadgroup;
    std::map<int, std::shared_ptr<GuardedMemory>> bytes;
    unsigned grid[3], threads[3];
  };

  Method method(const char* s) override {
    if (is(s, "computeCommandEncoder")) {
      return as_method(+[](CommandBuffer* self, SEL) { return autorelease(new Encoder(self)); });
    }
    if (is(s, "commit")) return as_method(+[](CommandBuffer* self, SEL) { self->commit(); });
    if (is(s, "waitUntilCompleted")) return as_method(+[](CommandBuffer*, SEL) {});
    if (is(s, "status")) {
      return as_method(+[](CommandBuffer* self, SEL) -> UInteger { return self->error ? 5 : 4; });
    }
    if (is(s, "error")) {
      return as_method(
          +[](CommandBuffer* self, SEL) -> objc::Object* { return self->error.get(); });
    }
    return Object::method(s);
  }

  void commit() {
    std::lock_guard<std::mutex> hold(machine_lock);
    std::string fault;
    if (settings().lost) fault = "Caused GPU Hang Error (emulated)";
    for (const Work& w : work) {
      if (!fault.empty()) break;
      DispatchRecord record;
      record.name = w.kernel->name;
      for (int i = 0; i < 3; ++i) record.grid[i] = w.grid[i];
      fault = run_kernel(*w.library, *w.kernel, w.constants, w.bindings, w.threadgroup, w.grid,
                         w.threads, settings().seed, &record.counters);
      records.push_back(record);
    }
    work.clear();
    if (!fault.empty()) error = std::make_unique<Error>(fault);
  }

  std::vector<Work> work;
  std::unique_ptr<Error> error;
};

Method Encoder::method(const char* s) {
  if (is(s, "setComputePipelineState:")) {
    return as_method(+[](Encoder* self, SEL, Pipeline* p) { self->pipeline = p; });
  }
  if (is(s, "setBuffer:offset:atIndex:")) {
    return as_method(+[](Encoder* self, SEL, Buffer* b, UInteger offset, UInteger index) {
      if (!b) {
        self->bindings.erase(static_cast<int>(index));
        return;
      }
      self->bindings[static_cast<int>(index)] = {static_cast<char*>(b->data) + offset,
                                                 {b->data, b->bytes}};
    });
  }
  if (is(s, "setBytes:length:atIndex:")) {
    return as_method(+[](Encoder* self, SEL, const void* p, UInteger n, UInteger index) {
      auto memory = std::make_shared<GuardedMemory>(n);
      std::memcpy(memory->data(), p, n);
      self->bytes[static_cast<int>(index)] = memory;
      self->bindings[static_cast<int>(index)] = {memory->data(), {memory->data(), n}};
    });
  }
  if (is(s, "setThreadgroupMemoryLength:atIndex:")) {
    return as_method(+[](Encoder* self, SEL, UInteger n, UInteger index) {
      self->threadgroup[static_cast<int>(index)] = n;
    });
  }
  if (is(s, "dispatchThreadgroups:threadsPerThreadgroup:")) {
    return as_method(
        +[](Encoder* self, SEL, Size grid, Size threads) { self->dispatch(grid, threads); });
  }
  if (is(s, "endEncoding")) return as_method(+[](Encoder*, SEL) {});
  return Object::method(s);
}

void Encoder::dispatch(const Size& grid, const Size& threads) {
  buffer->work.push_back(
      {pipeline->library,
       pipeline->kernel,
       pipeline->constants,
       bindings,
       threadgroup,
       bytes,
       {static_cast<unsigned>(grid.width), static_cast<unsigned>(grid.height),
        static_cast<unsigned>(grid.depth)},
       {static_cast<unsigned>(threads.width), static_cast<unsigned>(threads.height),
        static_cast<unsigned>(threads.depth)}});
}

class Queue : public objc::Object {
 public:
  Method method(const char* s) override {
    if (is(s, "commandBuffer")) {
      return as_method(+[](Queue*, SEL) { return autorelease(new CommandBuffer); });
    }
    return Object::method(s);
  }
};

class Device : public objc::Object {
 public:
  Method method(const char* s) override {
    if (is(s, "name")) {
      return as_method(+[](Device*, SEL) { return autorelease(new String("emulated Apple GPU")); });
    }
    if (is(s, "supportsFamily:")) {
      return as_method(+[](Device*, SEL, UInteger) { return settings().supports_family; });
    }
    if (is(s, "maxThreadgroupMemoryLength")) {
      return as_method(+[](Device*, SEL) -> UInteger { return kThreadgroupMemoryLimit; });
    }
    if (is(s, "maxBufferLength")) {
      return as_method(+[](Device*, SEL) -> UInteger { return UInteger{1} << 40; });
    }
    if (is(s, "newCommandQueue")) {
      return as_method(+[](Device*, SEL) -> objc::Object* { return new Queue; });
    }
    if (is(s, "newBufferWithLength:options:")) {
      return as_method(+[](Device*, SEL, UInteger n, UInteger) -> objc::Object* {
        std::int64_t& limit = settings().memory_limit;
        if (limit >= 0) {
          if (static_cast<std::int64_t>(n) > limit) return nullptr;
          limit -= static_cast<std::int64_t>(n);
        }
        return new Buffer(n);
      });
    }
    if (is(s, "newBufferWithBytesNoCopy:length:options:deallocator:")) {
      return as_method(+[](Device*, SEL, void* p, UInteger n, UInteger, void*) -> objc::Object* {
        const auto page = static_cast<std::uintptr_t>(getpagesize());
        const bool aligned = reinterpret_cast<std::uintptr_t>(p) % page == 0 && n % page == 0;
        return settings().wrap && aligned && n > 0 ? new Buffer(p, n) : nullptr;
      });
    }
    if (is(s, "newLibraryWithSource:options:error:")) {
      return as_method(+[](Device*, SEL, String* source, CompileOptions* options,
                           objc::Object** error) -> objc::Object* {
        if (!options || options->fast) {
          set_error(error, "the emulator has no fast math: setFastMathEnabled(false)");
          return nullptr;
        }
        try {
          auto* library = new MetalLibrary;
          library->library = Library::compile(source->text);
          std::lock_guard<std::mutex> hold(machine_lock);
          sources.push_back(source->text);
          return library;
        } catch (const std::exception& e) {
          set_error(error, e.what());
          return nullptr;
        }
      });
    }
    if (is(s, "newComputePipelineStateWithFunction:error:")) {
      return as_method(+[](Device*, SEL, Function* f, objc::Object**) -> objc::Object* {
        auto* pipeline = new Pipeline;
        pipeline->library = f->library;
        pipeline->kernel = f->kernel;
        pipeline->constants = f->constants;
        return pipeline;
      });
    }
    return Object::method(s);
  }
};

const bool registered = [] {
  objc::register_class("MTLCompileOptions", []() -> objc::Object* { return new CompileOptions; });
  objc::register_class("MTLFunctionConstantValues",
                       []() -> objc::Object* { return new ConstantTable; });
  objc::register_class_method("NSString", "stringWithCString:encoding:",
                              as_method(+[](void*, SEL, const char* text, UInteger) {
                                return autorelease(new String(text));
                              }));
  return true;
}();

}  // namespace

std::vector<DispatchRecord> take_records() {
  std::lock_guard<std::mutex> hold(machine_lock);
  return std::move(records);
}

std::vector<std::string> take_sources() {
  std::lock_guard<std::mutex> hold(machine_lock);
  return std::move(sources);
}

extern "C" void* MTLCreateSystemDefaultDevice() {
  return settings().available ? new Device : nullptr;
}

}  // namespace jft::emu
