#include "tests/client/fake_plane.h"

#include <sys/mman.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace stoker::client {

FakePlane::FakePlane(const FileDescriptor& memory, v1::ArenaLayout layout, uint64_t first_step, uint32_t top_k,
                     Check check, Hook hook)
    : layout_(std::move(layout)),
      first_step_(first_step),
      top_k_(top_k),
      check_(std::move(check)),
      hook_(std::move(hook)) {
  void* const mapping = mmap(nullptr, layout_.size_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  EXPECT_NE(mapping, MAP_FAILED);
  data_ = static_cast<std::byte*>(mapping);
  for (const v1::ArenaTensor& tensor : layout_.tensors()) {
    if (tensor.name() == "request") groups_ = static_cast<uint32_t>(tensor.shape(0)) - 1;
  }
  for (uint32_t doorbell = 0; doorbell <= groups_; ++doorbell) {
    Word<uint64_t>("request", doorbell) = first_step_ - 1;
    Word<uint64_t>("done", doorbell) = first_step_ - 1;
  }
  Word<int32_t>("ended", 0) = v1::PLANE_END_UNSPECIFIED;
  thread_ = std::thread([this] { Run(); });
}

FakePlane::~FakePlane() {
  Stop();
  munmap(data_, layout_.size_bytes());
}

uint64_t FakePlane::Disarm() {
  Stop();
  Publish<int32_t>("ended", 0, v1::PLANE_END_DISARMED);
  return steps_;
}

void FakePlane::Stop() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

std::byte* FakePlane::At(const std::string& name, uint64_t i, uint64_t j) const {
  for (const v1::ArenaTensor& tensor : layout_.tensors()) {
    if (tensor.name() != name) continue;
    return data_ + tensor.offset_bytes() + i * tensor.stride_bytes(0) + (j == 0 ? 0 : j * tensor.stride_bytes(1));
  }
  ADD_FAILURE() << "no tensor " << name;
  return data_;
}

template <typename T>
void FakePlane::Publish(const std::string& name, uint64_t i, T value) const {
  std::atomic_ref<T>(Word<T>(name, i)).store(value, std::memory_order_release);
}

void FakePlane::Run() {
  for (uint64_t step = first_step_; RunStep(step); ++step) ++steps_;
}

bool FakePlane::AwaitRequest(uint64_t step, uint32_t doorbell) {
  std::atomic_ref<uint64_t> request(Word<uint64_t>("request", doorbell));
  while (!stop_) {
    const uint64_t number = request.load(std::memory_order_acquire);
    if (number == step) return true;
    if (number != step - 1) {
      Publish<int32_t>("ended", 0, v1::PLANE_END_BAD_STEP);
      return false;
    }
    std::this_thread::yield();
  }
  return false;
}

bool FakePlane::RunStep(uint64_t step) {
  Rung rung;
  rung.step = step;
  for (uint32_t doorbell = 0; doorbell <= groups_; ++doorbell) {
    if (!AwaitRequest(step, doorbell)) return false;
    if (doorbell == 0) {
      rung.rows.resize(static_cast<size_t>(Word<int32_t>("batch_rows", 0)));
      for (size_t i = 0; i < rung.rows.size(); ++i) {
        rung.rows[i] = {Word<uint64_t>("sequence_ids", i), Word<int32_t>("state_rows", i), Word<int32_t>("lengths", i)};
      }
    }
    if (doorbell == groups_) {
      for (size_t i = 0; i < rung.rows.size(); ++i) rung.rows[i].commit = Word<int32_t>("commits", i);
    }
    if (doorbell == 0 || doorbell == groups_) {
      for (size_t i = 0; i < rung.rows.size(); ++i) Word<int32_t>("statuses", i) = check_(rung.rows[i]);
    }
    if (doorbell < groups_) AnswerGroup(doorbell, rung.rows.size());
    rung.doorbell = doorbell;
    if (hook_ && hook_(rung) == Answer::kSilence) return false;
    Publish<uint64_t>("done", doorbell, step);
  }
  return true;
}

void FakePlane::AnswerGroup(uint32_t group, size_t rows) const {
  const std::string indices = absl::StrCat("indices.", group), hot_rows = absl::StrCat("hot_rows.", group);
  for (size_t row = 0; row < rows; ++row) {
    int32_t misses = 0;
    for (uint32_t i = 0; i < top_k_; ++i) {
      const int32_t entry = Word<int32_t>(indices, row, i);
      Word<int32_t>(hot_rows, row, i) = entry;
      misses += entry >= 0 ? 1 : 0;
    }
    Word<int32_t>(absl::StrCat("misses.", group), row) = misses;
  }
}

}  // namespace stoker::client
