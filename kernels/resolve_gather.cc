#include "kernels/resolve_gather.h"

#include "kernels/field_check.h"

namespace stoker::kernels {

absl::Status Validate(const ResolveArgs& resolve, const GatherCompactArgs& gather) {
  if (absl::Status status = Validate(resolve); !status.ok()) return status;
  if (absl::Status status = Validate(gather); !status.ok()) return status;
  FieldCheck check("resolve_gather");
  check.InRange("gather.rows", gather.rows, resolve.rows, resolve.rows)
      .InRange("gather.top_k", gather.top_k, resolve.top_k, resolve.top_k)
      .Holds("gather.miss_pool_rows, miss_hot_rows, miss_counts",
             gather.miss_pool_rows == resolve.miss_pool_rows && gather.miss_hot_rows == resolve.miss_hot_rows &&
                 gather.miss_counts == resolve.miss_counts && gather.miss_counts != nullptr,
             "must be the lists that the resolve writes");
  return check.status();
}

}  // namespace stoker::kernels
