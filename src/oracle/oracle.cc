#include "oracle/oracle.h"

namespace coda::oracle {

Grid<double> accumulators(const Grid<double>& a, const Grid<double>& b) {
  Grid<double> out(a.rows, b.rows);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t j = 0; j < b.rows; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < a.cols; ++k) sum += a(i, k) * b(j, k);
      out(i, j) = sum;
    }
  return out;
}

}  // namespace coda::oracle
