// Pools as messages.
#pragma once

#include "server/core/registry.h"
#include "stoker/v1/pools.pb.h"

namespace stoker::rpc {

inline core::PoolSpec FromProto(const v1::PoolSpec& proto) {
  core::PoolSpec spec;
  spec.name = proto.name();
  spec.layers = proto.layers();
  // A value that this build does not know is left unspecified, which Normalize refuses.
  if (v1::RowLayout_IsValid(proto.row_layout())) spec.row_layout = static_cast<core::RowLayout>(proto.row_layout());
  spec.row_bytes = proto.row_bytes();
  spec.v_row_bytes = proto.v_row_bytes();
  spec.block_rows = proto.block_rows();
  spec.prefix_rows = proto.prefix_rows();
  spec.blocks = proto.blocks();
  return spec;
}

inline void ToProto(const core::PoolSpec& spec, v1::PoolSpec* proto) {
  proto->set_name(spec.name);
  proto->set_layers(static_cast<uint32_t>(spec.layers));
  proto->set_row_layout(static_cast<v1::RowLayout>(spec.row_layout));
  proto->set_row_bytes(static_cast<uint32_t>(spec.row_bytes));
  proto->set_v_row_bytes(static_cast<uint32_t>(spec.v_row_bytes));
  proto->set_block_rows(static_cast<uint32_t>(spec.block_rows));
  proto->set_prefix_rows(static_cast<uint32_t>(spec.prefix_rows));
  proto->set_blocks(static_cast<uint32_t>(spec.blocks));
}

inline void ToProto(const core::PoolDescription& description, v1::Pool* proto) {
  ToProto(description.spec, proto->mutable_spec());
  v1::PoolUsage* usage = proto->mutable_usage();
  usage->set_capacity_bytes(static_cast<uint64_t>(description.bytes));
  usage->set_free_blocks(static_cast<uint32_t>(description.blocks.free));
  usage->set_referenced_blocks(static_cast<uint32_t>(description.blocks.referenced));
  usage->set_cached_blocks(static_cast<uint32_t>(description.blocks.cached));
  usage->set_sequences(static_cast<uint32_t>(description.sequences));
  usage->set_sessions(static_cast<uint32_t>(description.sessions));
}

}  // namespace stoker::rpc
