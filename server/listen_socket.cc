#include "server/listen_socket.h"
