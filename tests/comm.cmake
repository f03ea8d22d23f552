# comm
