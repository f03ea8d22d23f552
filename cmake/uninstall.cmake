# cmake -DMANIFEST=FILE -P uninstall.cmake: removes what the last `cmake --install` has put where that file says, and
# the project's own folders that this leaves empty.
if(NOT EXISTS ${MANIFEST})
  message(FATAL_ERROR "nothing is installed from here: found no ${MANIFEST}")
endif()
file(STRINGS ${MANIFEST} paths)
foreach(path IN LISTS paths)
  file(REMOVE "$ENV{DESTDIR}${path}")
  cmake_path(GET path PARENT_PATH folder)
  while(folder MATCHES "/cpattn(/|$)") # a folder of ours; rmdir leaves one that has something in it
    execute_process(COMMAND rmdir "$ENV{DESTDIR}${folder}" ERROR_QUIET)
    cmake_path(GET folder PARENT_PATH folder)
  endwhile()
endforeach()
file(REMOVE ${MANIFEST})
list(LENGTH paths n)
message(STATUS "removed ${n} files")
