# What the project stands on; all are Debian packages. quickstart installs them.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(MPI REQUIRED COMPONENTS C)
find_package(PkgConfig REQUIRED)
pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
pkg_check_modules(YAML REQUIRED IMPORTED_TARGET yaml-0.1)

# What the library's objects see: its own folders, MPI, OpenBLAS and threads.
add_library(cpattn_deps INTERFACE)
target_include_directories(cpattn_deps INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
target_link_libraries(cpattn_deps INTERFACE MPI::MPI_C PkgConfig::OPENBLAS Threads::Threads m)
