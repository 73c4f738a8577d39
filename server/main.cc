// stokerd. Exit status: see RunProgram.
#include "server/program.h"

int main(int argc, char** argv) { return stoker::server::RunProgram(argc, argv); }
