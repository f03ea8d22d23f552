# The CUDA toolchain: architectures, flags, and the rule that a kernel which spills registers, or whose wgmma ptxas
# serialises, does not build. Architecture 80 also as PTX, for devices after 9.0.
set(CPATTN_CUDA_ARCHITECTURES "80;90-real" CACHE STRING "what device code is compiled for; 90a is always among it")
# Tests where no GPU is want the errors of device code alone. It becomes PTX that is not optimised, in a fifth of the time;
# ptxas does not run, and what it checks stays unseen: spills, serialised wgmma, instructions in asm().
if(CPATTN_ERRORS_ONLY)
  set(CPATTN_CUDA_ARCHITECTURES 90-virtual)
endif()
set(CMAKE_CUDA_ARCHITECTURES ${CPATTN_CUDA_ARCHITECTURES}) # set before the language: CMake 3.25's default is too old for CUDA 13
enable_language(CUDA)
find_package(CUDAToolkit 12.5 REQUIRED)

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
set_property(GLOBAL APPEND PROPERTY JOB_POOLS cuda=2) # a kernel takes a gigabyte to compile

set(cuda_options -lineinfo -Xcompiler=-Wall,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics -Werror=all-warnings
    -Xptxas=--warn-on-spills,--warning-as-error)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  list(APPEND cuda_options --compress-mode=size) # a quarter of what programs and wheels are without it
endif()
if(CPATTN_ERRORS_ONLY) # a third of the time is for what only a GPU would use, and for host code that launches kernels
  list(REMOVE_ITEM cuda_options -lineinfo --compress-mode=size)
  list(APPEND cuda_options --no-compress)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O0")
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.9)
    list(APPEND cuda_options --Ofast-compile=max)
  endif()
endif()
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")

# cpattn_kernels(NAME ARCHITECTURES SOURCE...): device code of one folder, for a list of architectures; all if it is empty.
function(cpattn_kernels name architectures)
  add_library(cpattn_${name} OBJECT ${ARGN})
  target_include_directories(cpattn_${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
  set(launcher ${PROJECT_SOURCE_DIR}/cmake/refuse_serialised_wgmma.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(cpattn_${name} PROPERTIES JOB_POOL_COMPILE cuda CUDA_COMPILER_LAUNCHER "${launcher}")
  if(architectures)
    if(CPATTN_ERRORS_ONLY)
      list(TRANSFORM architectures REPLACE -real -virtual)
    endif()
    set_target_properties(cpattn_${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  endif()
endfunction()
