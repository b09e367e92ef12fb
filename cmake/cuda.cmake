# Whether the CUDA kernels are built, and the reason, in one line of the configure output.
#
# nvcc is taken from CMAKE_CUDA_COMPILER, CUDACXX or the PATH; else from the wheels of PyPI, which must all
# have the same release (a mix dies with "Unsupported .version"):
#   pip install nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
#               nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
set(JFT_CUDA_ENABLED OFF)

# Sets `out` to the folder of the wheels' toolkit, or to "".
function(jft_find_wheel_toolkit out)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u, pathlib as p; s = u.find_spec('nvidia'); print(next((str(d) for r in (s.submodule_search_locations if s else ()) for d in sorted(p.Path(r).glob('cu*')) if (d / 'bin' / 'nvcc').exists()), ''))"
    OUTPUT_VARIABLE _folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${out} "${_folder}" PARENT_SCOPE)
endfunction()

if(JFT_CUDA STREQUAL "OFF")
  message(STATUS "jax_flashtrain: CUDA kernels off (JFT_CUDA=OFF)")
else()
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(JFT_NVCC nvcc)
    if(NOT JFT_NVCC)
      jft_find_wheel_toolkit(_toolkit)
      if(_toolkit)
        set(CMAKE_CUDA_COMPILER "${_toolkit}/bin/nvcc" CACHE FILEPATH "nvcc of the PyPI wheels")
        set(CUDAToolkit_ROOT "${_toolkit}" CACHE PATH "CUDA toolkit of the PyPI wheels")
        set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -L${_toolkit}/lib" CACHE STRING "" FORCE)
      endif()
    endif()
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(JFT_CUDA_ENABLED ON)
    message(STATUS "jax_flashtrain: CUDA kernels on (${CMAKE_CUDA_COMPILER})")
  elseif(JFT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "JFT_CUDA=ON, but no CUDA compiler (nvcc) was found")
  else()
    message(STATUS "jax_flashtrain: CUDA kernels off (no nvcc found)")
  endif()
endif()
