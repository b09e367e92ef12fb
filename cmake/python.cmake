# Python, nanobind and the XLA FFI headers (they ship inside jaxlib; never copied into this tree).
#
# SKBUILD_SABI_COMPONENT is set by scikit-build-core when a stable-ABI wheel is built (Python 3.12+).
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module
             OPTIONAL_COMPONENTS ${SKBUILD_SABI_COMPONENT})
execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
                OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
find_package(nanobind CONFIG REQUIRED)

set(JFT_XLA_INCLUDE "" CACHE PATH "Folder that holds xla/ffi/api/ffi.h (empty: jaxlib's own)")
set(_xla_include "${JFT_XLA_INCLUDE}")
if(NOT _xla_include)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('jaxlib').origin), 'include'))"
    OUTPUT_VARIABLE _xla_include OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
if(NOT EXISTS "${_xla_include}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "xla/ffi/api/ffi.h not found under ${_xla_include}: is jaxlib installed?")
endif()
file(READ "${_xla_include}/xla/ffi/api/c_api.h" _c_api)
string(REGEX MATCH "XLA_FFI_API_MAJOR ([0-9]+)" _ "${_c_api}")
set(JFT_FFI_MAJOR ${CMAKE_MATCH_1})
string(REGEX MATCH "XLA_FFI_API_MINOR ([0-9]+)" _ "${_c_api}")
set(JFT_FFI_MINOR ${CMAKE_MATCH_1})
message(STATUS "jax_flashtrain: XLA FFI headers ${JFT_FFI_MAJOR}.${JFT_FFI_MINOR} (${_xla_include})")

add_library(jft_ffi INTERFACE)
target_include_directories(jft_ffi SYSTEM INTERFACE ${_xla_include})
target_compile_definitions(jft_ffi INTERFACE
  JFT_FFI_MAJOR=${JFT_FFI_MAJOR} JFT_FFI_MINOR=${JFT_FFI_MINOR})

# Warnings are errors in our own code.
add_library(jft_warnings INTERFACE)
target_compile_options(jft_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror>)

# jft_add_module(NAME sources...): a nanobind module in the wheel (stable ABI from Python 3.12 on).
function(jft_add_module name)
  nanobind_add_module(${name} STABLE_ABI NB_STATIC NOMINSIZE ${ARGN})
  target_link_libraries(${name} PRIVATE jft_ffi)
  install(TARGETS ${name} LIBRARY DESTINATION ${JFT_INSTALL_DIR})
endfunction()
