#include <cpattn/status.h>
