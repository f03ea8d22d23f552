# What `cmake --install` leaves: headers, library, program, example configurations, man pages, completions, and how to
# find them (find_package(cpattn) and pkg-config); the target uninstall takes it away.
include(CMakePackageConfigHelpers)

# Everything that is installed, without the tests.
add_custom_target(installed DEPENDS cpattn cpattn_mpi cpattn_llm cp_attn)

set(CPATTN_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/cpattn)
install(TARGETS cpattn cpattn_mpi cpattn_llm EXPORT cpattn
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS cp_attn RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/cpattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES deploy/completion/cp_attn DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES deploy/completion/_cp_attn DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES deploy/completion/cp_attn.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/cpattn/configs FILES_MATCHING PATTERN "*.yaml")

install(EXPORT cpattn NAMESPACE cpattn:: FILE cpattn-targets.cmake DESTINATION ${CPATTN_PACKAGE_DIR})
configure_package_config_file(cmake/cpattn-config.cmake.in cmake/cpattn-config.cmake
                              INSTALL_DESTINATION ${CPATTN_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/cpattn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/cpattn-config.cmake ${PROJECT_BINARY_DIR}/cmake/cpattn-config-version.cmake
        DESTINATION ${CPATTN_PACKAGE_DIR})

# The .pc file finds its prefix from its own place, so that an installed tree may be moved.
file(RELATIVE_PATH CPATTN_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
foreach(name cpattn cpattn_mpi cpattn_llm)
  configure_file(cmake/${name}.pc.in cmake/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/cmake/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

include(cmake/man_pages.cmake)
add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -DMANIFEST=${PROJECT_BINARY_DIR}/install_manifest.txt
                  -P ${PROJECT_SOURCE_DIR}/cmake/uninstall.cmake VERBATIM)
