# What the project stands on; all are Debian packages. quickstart installs them.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
if(CPATTN_CUDA)
  # The CUDA runtime is linked statically and NCCL is loaded at run time: the program starts where neither is installed.
  find_package(CUDAToolkit 12.5 REQUIRED)
  set(CPATTN_CUDA_LIBRARIES CUDA::cudart_static)
endif()
pkg_check_modules(CRYPTO REQUIRED IMPORTED_TARGET libcrypto)
set(CPATTN_CRYPTO PkgConfig::CRYPTO)
if(CPATTN_PYTHON) # A wheel has to load where there is no libcrypto, or another one.
  find_library(CPATTN_CRYPTO_ARCHIVE libcrypto.a HINTS ${CRYPTO_LIBDIR} REQUIRED)
  set(CPATTN_CRYPTO ${CPATTN_CRYPTO_ARCHIVE})
endif()

# Optional; where the library runs the kernel decides. It lies within, since it is small and not every machine has it.
find_library(CPATTN_URING_ARCHIVE liburing.a)
set(CPATTN_URING)
if(CPATTN_URING_ARCHIVE)
  set(CPATTN_URING ${CPATTN_URING_ARCHIVE})
endif()

# What the library's objects see: its own folders and threads.
add_library(cpattn_deps INTERFACE)
target_include_directories(cpattn_deps INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(cpattn_deps INTERFACE ${CPATTN_CRYPTO} ${CPATTN_URING} ${CPATTN_CUDA_LIBRARIES} Threads::Threads m)
if(CPATTN_CUDA)
  target_compile_definitions(cpattn_deps INTERFACE CPA_HAVE_CUDA)
  target_include_directories(cpattn_deps SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS}) # NVTX
endif()

# What models of a folder and text stand on: the program, and libcpattn_llm, which a Python package may do without.
set(CPATTN_LLM ON)
set(required REQUIRED)
if(CPATTN_PYTHON)
  set(required)
endif()
pkg_check_modules(JANSSON ${required} IMPORTED_TARGET jansson)
pkg_check_modules(PCRE2 ${required} IMPORTED_TARGET libpcre2-8)
pkg_check_modules(SENTENCEPIECE ${required} IMPORTED_TARGET sentencepiece)
find_library(UNISTRING_LIBRARY unistring ${required}) # which has no .pc file
if(CPATTN_PYTHON)
  if(NOT JANSSON_FOUND OR NOT PCRE2_FOUND OR NOT SENTENCEPIECE_FOUND OR NOT UNISTRING_LIBRARY)
    set(CPATTN_LLM OFF)
    message(NOTICE "cpattn: built without cpattn.Engine, which needs libjansson-dev, libpcre2-dev, "
                   "libsentencepiece-dev and libunistring-dev")
  endif()
  return()
endif()

# What the program stands on beside that.
find_package(MPI REQUIRED COMPONENTS C)
pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(YAML REQUIRED IMPORTED_TARGET yaml-0.1)
pkg_check_modules(MICROHTTPD REQUIRED IMPORTED_TARGET libmicrohttpd)
pkg_check_modules(CURL REQUIRED IMPORTED_TARGET libcurl)
pkg_check_modules(CAIRO REQUIRED IMPORTED_TARGET cairo)
