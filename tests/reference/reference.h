// The oracle: every operation of the kernels once more, slow and obvious, written from kernels/README.md and
// kernels/plane.h alone.
//
// Works on host memory and on the calling thread. Arguments must have passed Validate. Where the contract lets client
// memory hold anything, so does the oracle, but nothing may write to it meanwhile.
#pragma once

#include "kernels/gather.h"
#include "kernels/invalidate.h"
#include "kernels/plane.h"
#include "kernels/resolve.h"
#include "kernels/transfer.h"

namespace stoker::reference {

void Resolve(const kernels::ResolveArgs& args);
void Gather(const kernels::GatherCompactArgs& args);
void Gather(const kernels::GatherDenseArgs& args);
void Transfer(const kernels::TransferArgs& args);
void Invalidate(const kernels::InvalidateArgs& args);
void Reset(const kernels::ResetArgs& args);
void Place(const kernels::PlaceArgs& args);
void BeginBatch(const kernels::BatchArgs& args);
void PlanCommits(const kernels::BatchArgs& args);
void EndBatch(const kernels::BatchArgs& args);

}  // namespace stoker::reference
