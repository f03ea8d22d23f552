# The pure logic: no MPI, no device.
foreach(module owner_map block_pool step_plan planner rounds verify_budget)
  cpattn_unit_test(test_${module} test_${module}.c)
endforeach()
cpattn_unit_test(test_scheduler test_scheduler.c scheduler_model.c)
cpattn_unit_test(test_prefix_cache test_prefix_cache.c)
cpattn_unit_test(test_prefix test_prefix.c)
cpattn_unit_test(test_placement test_placement.c)

cpattn_unit_test(test_swap test_swap.c)
cpattn_unit_test(test_shadow test_shadow.c shadow_model.c)

# The same model beside the twin of the library, with its bugs switched on.
add_executable(test_shadow_faults test_shadow_faults.c shadow_model.c)
target_compile_definitions(test_shadow_faults PRIVATE CPA_FAULT_POINTS)
target_link_libraries(test_shadow_faults PRIVATE cpattn_static_faults PkgConfig::CUNIT)
add_test(NAME test_shadow_faults COMMAND test_shadow_faults)
set_tests_properties(test_shadow_faults PROPERTIES TIMEOUT ${CPATTN_TEST_TIMEOUT} LABELS host)
