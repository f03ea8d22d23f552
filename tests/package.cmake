# The installed package, as a user meets it, and the direction of dependencies between the folders.
set(package_script ${CMAKE_CURRENT_SOURCE_DIR}/package.sh)
set(package_dir ${CMAKE_CURRENT_BINARY_DIR}/package)
set(package_prefix ${package_dir}/prefix)
file(MAKE_DIRECTORY ${package_dir})

# cpattn_package_test(NAME ARGUMENT...): a test that calls package.sh.
function(cpattn_package_test name)
  add_test(NAME ${name} COMMAND bash ${package_script} ${ARGN} WORKING_DIRECTORY ${package_dir})
  string(REPLACE ";" " " mpirun "${CPATTN_MPIRUN}")
  # A compiler for C++ is asked of the headers only; the project itself has no C++.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host
    ENVIRONMENT "CC=${CMAKE_C_COMPILER};CXX=c++;CMAKE=${CMAKE_COMMAND};MPIRUN=${mpirun};${CPATTN_MPI_TEST_ENV}")
endfunction()

cpattn_package_test(folders_include_only_what_they_may includes ${PROJECT_SOURCE_DIR})

# An installed library with sanitizers or coverage cannot be linked by a plain compiler.
if(NOT CPATTN_SANITIZE AND NOT CPATTN_COVERAGE)
  cpattn_package_test(package_installs install ${PROJECT_BINARY_DIR} ${package_prefix})
  cpattn_package_test(package_headers_compile_alone headers ${package_prefix})
  cpattn_package_test(package_exports_only_its_own_symbols symbols
    ${package_prefix}/${CMAKE_INSTALL_LIBDIR}/libcpattn.so libcpattn.so.${PROJECT_VERSION_MAJOR})
  cpattn_package_test(package_examples_through_cmake cmake ${PROJECT_SOURCE_DIR} ${package_prefix} ${package_dir}/cmake)
  cpattn_package_test(package_examples_through_pkgconfig pkgconfig
    ${PROJECT_SOURCE_DIR} ${package_prefix} ${CMAKE_INSTALL_LIBDIR} ${package_dir}/pkgconfig)
  set_tests_properties(package_installs PROPERTIES FIXTURES_SETUP package)
  set_tests_properties(package_headers_compile_alone package_exports_only_its_own_symbols
    package_examples_through_cmake package_examples_through_pkgconfig PROPERTIES FIXTURES_REQUIRED package)
endif()
