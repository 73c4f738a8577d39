#include "server/config.h"
