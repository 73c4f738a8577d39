#include "client/replay/normal.h"

#include <cmath>

namespace stoker::replay {
namespace {

// Right edge of the lowest layer and area of every layer, for 256 layers (Marsaglia and Tsang 2000).
constexpr double kTailStart = 3.6541528853610088;
constexpr double kLayerArea = 0.00492867323399;

double Density(double x) { return std::exp(-0.5 * x * x); }

// Uniform in (0, 1].
double OpenUnit(Random& random) { return static_cast<double>((random.Next() >> 11) + 1) * 0x1p-53; }

}  // namespace

Normal::Normal() {
  edge_[0] = kLayerArea / Density(kTailStart);
  edge_[1] = kTailStart;
  for (int i = 2; i < kLayers; ++i) {
    edge_[i] = std::sqrt(-2 * std::log(kLayerArea / edge_[i - 1] + Density(edge_[i - 1])));
  }
  edge_[kLayers] = 0;
  for (int i = 0; i <= kLayers; ++i) height_[i] = Density(edge_[i]);
  for (int i = 0; i < kLayers; ++i) {
    width_[i] = static_cast<float>(edge_[i] * 0x1p-31);
    inside_[i] = static_cast<uint32_t>(edge_[i + 1] / edge_[i] * 0x1p31);
  }
}

float Normal::Edge(Random& random, uint32_t layer, float z) const {
  for (;;) {
    if (layer == 0) {
      double x, y;
      do {
        x = -std::log(OpenUnit(random)) / kTailStart;
        y = -std::log(OpenUnit(random));
      } while (2 * y < x * x);
      return static_cast<float>(z < 0 ? -(kTailStart + x) : kTailStart + x);
    }
    const double y = height_[layer] + (height_[layer + 1] - height_[layer]) * OpenUnit(random);
    if (y < Density(z)) return z;
    // Rejected: draw anew, rectangle included.
    const uint64_t word = random.Next();
    layer = word & (kLayers - 1);
    z = static_cast<float>(static_cast<int32_t>(word >> 32)) * width_[layer];
    if (static_cast<uint32_t>(AbsInt(static_cast<int32_t>(word >> 32))) < inside_[layer]) return z;
  }
}

}  // namespace stoker::replay
