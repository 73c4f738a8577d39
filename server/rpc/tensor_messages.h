// Requests about tensors, as core has them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/core/session.h"
#include "stoker/v1/residency.pb.h"
#include "stoker/v1/sessions.pb.h"

namespace stoker::rpc {

// What could not be expressed in core's terms, or would take memory before it is refused, makes it malformed.
inline core::TensorRequest FromProto(const v1::RegisterTensorRequest& proto) {
  constexpr int kMaxLayers = 1024;
  constexpr int kMaxParts = 2;
  constexpr size_t kIpcHandleBytes = 64;
  core::TensorRequest request;
  switch (proto.memory_case()) {
    case v1::RegisterTensorRequest::kCudaIpc:
      if (proto.cuda_ipc().handle().size() != kIpcHandleBytes) {
        request.malformed = absl::InvalidArgumentError(
            absl::StrCat("cuda_ipc.handle: ", proto.cuda_ipc().handle().size(),
                         " bytes given, a cudaIpcMemHandle_t has ", kIpcHandleBytes,
                         ". Handles of other kinds are not taken: memory from cuMemCreate or cudaMallocAsync has no "
                         "cudaIpcMemHandle_t; take it from cudaMalloc (PyTorch: expandable_segments:False)"));
      }
      request.ipc_handle = proto.cuda_ipc().handle();
      request.device = proto.cuda_ipc().device();
      break;
    case v1::RegisterTensorRequest::kOfferedDescriptor:
      request.descriptor = proto.offered_descriptor();
      break;
    case v1::RegisterTensorRequest::MEMORY_NOT_SET:
      request.malformed =
          absl::InvalidArgumentError("memory: not given, one of cuda_ipc and offered_descriptor is needed");
      break;
  }
  if (proto.layers_size() > kMaxLayers) {
    request.malformed =
        absl::InvalidArgumentError(absl::StrCat("layers: ", proto.layers_size(), " given, limit ", kMaxLayers));
  }
  if (proto.parts_size() > kMaxParts) {
    request.malformed =
        absl::InvalidArgumentError(absl::StrCat("parts: ", proto.parts_size(), " given, limit ", kMaxParts));
  }
  if (!request.malformed.ok()) return request;
  core::TensorSpec& spec = request.spec;
  spec.offset_bytes = proto.offset_bytes();
  spec.size_bytes = proto.size_bytes();
  spec.layers.assign(proto.layers().begin(), proto.layers().end());
  spec.layer_stride_bytes = proto.layer_stride_bytes();
  spec.rows = proto.rows();
  spec.page_rows = proto.page_rows();
  for (const v1::TensorPart& part : proto.parts()) {
    spec.parts.push_back({part.part(), part.offset_bytes(), part.row_stride_bytes(), part.page_stride_bytes()});
  }
  return request;
}

// Points into the message.
inline core::TensorRows FromProto(const v1::TensorRows& proto) {
  return {absl::MakeConstSpan(proto.tensor_ids().data(), static_cast<size_t>(proto.tensor_ids_size())),
          absl::MakeConstSpan(proto.rows().data(), static_cast<size_t>(proto.rows_size())), proto.first_row()};
}

}  // namespace stoker::rpc
