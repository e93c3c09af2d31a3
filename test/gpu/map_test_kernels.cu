#include "coda/hopper/map.h"
#include "map_programs.h"

using namespace coda;
using namespace coda::test;

#define CODA_INSTANTIATE(...) \
  template int coda::hopper::mapped::launch_map<__VA_ARGS__>(const coda::detail::HopperMap&);
CODA_MAP_TEST_PROGRAMS(CODA_INSTANTIATE)
