#include "server/core/descriptor_offers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace stoker::core {

void DescriptorOffers::Expire(absl::Time now) {
  while (!offers_.empty() && now - offers_.front().added > kTimeToTake) offers_.pop_front();
}

absl::StatusOr<uint64_t> DescriptorOffers::Add(FileDescriptor descriptor, absl::Time now) {
  Expire(now);
  if (offers_.size() >= kMaxWaiting) {
    return absl::ResourceExhaustedError(absl::StrCat("offered_descriptor: ", offers_.size(),
                                                     " of the session wait to be registered, limit ", kMaxWaiting));
  }
  offers_.push_back({++last_number_, now, std::move(descriptor)});
  return last_number_;
}

absl::StatusOr<FileDescriptor> DescriptorOffers::Take(uint64_t number, absl::Time now) {
  Expire(now);
  const auto it = std::find_if(offers_.begin(), offers_.end(), [&](const Offer& o) { return o.number == number; });
  if (it == offers_.end()) {
    return absl::NotFoundError(absl::StrCat("offered_descriptor: ", number,
                                            " was not handed over by this session in the last ",
                                            absl::FormatDuration(kTimeToTake), ", or was used"));
  }
  FileDescriptor descriptor = std::move(it->descriptor);
  offers_.erase(it);
  return descriptor;
}

}  // namespace stoker::core
