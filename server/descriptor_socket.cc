#include "server/descriptor_socket.h"
