# The pure logic: no MPI, no device.
foreach(module owner_map block_pool step_plan planner rounds verify_budget)
  cpattn_unit_test(test_${module} test_${module}.c)
endforeach()
cpattn_unit_test(test_scheduler test_scheduler.c scheduler_model.c)
