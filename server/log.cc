#include "server/log.h"
