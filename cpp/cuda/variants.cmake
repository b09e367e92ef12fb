# THE list of compiled kernels: element type and head bucket. Twins: kHeadBuckets in tiles.h (a bucket that
# is missing here rounds up to the next one of its type).
set(JFT_CUDA_VARIANTS
  BF16:64 BF16:96 BF16:128 BF16:192 BF16:256
  F16:64 F16:96 F16:128 F16:192 F16:256
  TF32:64 TF32:128 TF32:256
  TF32x3:64 TF32x3:128 TF32x3:256)

# jft_cuda_variants(FOLDER OUT): writes FOLDER/<type>_<head>.cu for each variant and FOLDER/variants.inc (the
# dispatch table's rows); OUT receives the sources.
function(jft_cuda_variants folder out)
  set(_sources "")
  set(_rows "")
  foreach(_variant IN LISTS JFT_CUDA_VARIANTS)
    string(REPLACE ":" ";" _parts ${_variant})
    list(GET _parts 0 _type)
    list(GET _parts 1 _head)
    set(_file ${folder}/${_type}_${_head}.cu)
    file(CONFIGURE OUTPUT ${_file} CONTENT
      "#include \"launch/head_kernels.h\"\nnamespace jft::cuda { template struct HeadKernels<@_type@, @_head@>; }\n"
      @ONLY)
    list(APPEND _sources ${_file})
    string(APPEND _rows "JFT_VARIANT(${_type}, ${_head})\n")
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/variants.inc CONTENT "${_rows}" @ONLY)
  set(${out} ${_sources} PARENT_SCOPE)
endfunction()
