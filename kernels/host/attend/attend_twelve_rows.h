/* attend_group of instruction sets whose full group is of 12 rows: the loops for each number of rows. Included behind
 * attend_vector.h. */
static void attend_group(const cpa_attend_tile *tile, const cpa_attend_group *group) {
    switch (group->rows) {
        case 1: attend_rows(1, tile, group); break;
        case 2: attend_rows(2, tile, group); break;
        case 3: attend_rows(3, tile, group); break;
        case 4: attend_rows(4, tile, group); break;
        case 5: attend_rows(5, tile, group); break;
        case 6: attend_rows(6, tile, group); break;
        case 7: attend_rows(7, tile, group); break;
        case 8: attend_rows(8, tile, group); break;
        case 9: attend_rows(9, tile, group); break;
        case 10: attend_rows(10, tile, group); break;
        case 11: attend_rows(11, tile, group); break;
        default: attend_rows(12, tile, group); break;
    }
}
