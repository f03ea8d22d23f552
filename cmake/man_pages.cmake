# Man pages from what --help of the commands says, where help2man is there to make them.
find_program(CPATTN_HELP2MAN help2man)
if(NOT CPATTN_HELP2MAN)
  message(STATUS "help2man was not found: no man pages")
endif()
if(NOT CPATTN_HELP2MAN OR CMAKE_CROSSCOMPILING OR CPATTN_SANITIZE OR CPATTN_COVERAGE)
  return()
endif()
set(man_pages)
# cpattn_man_page(NAME ABOUT WORD...): the page of `cp_attn WORD...`.
function(cpattn_man_page name about)
  set(page ${PROJECT_BINARY_DIR}/man/${name}.1)
  string(TOUPPER ${name} upper)
  list(JOIN ARGN " " words)
  string(STRIP "sh ${PROJECT_SOURCE_DIR}/cmake/help_for_man.sh $<TARGET_FILE:cp_attn> ${words}" command)
  add_custom_command(OUTPUT ${page}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/man
    COMMAND ${CPATTN_HELP2MAN} --no-info --name=${about} --version-string=${PROJECT_VERSION} --source=cp_attn
            --include=${PROJECT_SOURCE_DIR}/cmake/man_sections.h2m --output=${page} ${command}
    # Its name, where help2man has that of the shell.
    COMMAND sed -i "s/^\\.TH [^ ]* /.TH ${upper} /; /^\\.SH NAME/ {n; s/.* \\\\- /${name} \\\\- /}" ${page}
    DEPENDS cp_attn cmake/help_for_man.sh cmake/man_sections.h2m VERBATIM)
  set(man_pages ${man_pages} ${page} PARENT_SCOPE)
endfunction()
cpattn_man_page(cp_attn "context-parallel attention: a run of requests")
cpattn_man_page(cp_attn-serve "serve requests over HTTP" serve)
cpattn_man_page(cp_attn-generate "answer a prompt" generate)
cpattn_man_page(cp_attn-bench "measure one operation" bench)
cpattn_man_page(cp_attn-bench-serve "measure a server" bench serve)
cpattn_man_page(cp_attn-check "compute rows of --violation-dump again" check)
cpattn_man_page(cp_attn-plot "draw results and timelines" plot)
add_custom_target(man_pages ALL DEPENDS ${man_pages})
add_dependencies(installed man_pages)
install(FILES ${man_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
