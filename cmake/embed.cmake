# cpattn_embed(FILE NAME OUT): OUT becomes C with the bytes of FILE as cpa_NAME, and their number as cpa_NAME_bytes.
function(cpattn_embed file name out)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  file(CONFIGURE OUTPUT ${out} @ONLY
       CONTENT "#include <stddef.h>\n\nconst unsigned char cpa_@name@[] = {@bytes@};\nconst size_t cpa_@name@_bytes = sizeof cpa_@name@;\n")
endfunction()
