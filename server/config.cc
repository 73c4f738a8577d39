#include "server/config.h"

#include <fcntl.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/available_memory.h"
#include "server/core/pool_spec.h"
#include "server/device_choice.h"

namespace stoker::server {
namespace {

using config::v1::Knob;
using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;
using Errors = std::vector<std::string>;

// More than any sensible file: a pool takes about 200 bytes.
constexpr size_t kMaxFileBytes = 1 << 20;
constexpr size_t kHelpColumns = 100;

struct Command {
  absl::string_view flag;
  CommandLine::Action action;
  absl::string_view help;
};

constexpr Command kCommands[] = {
    {"print-config", CommandLine::Action::kPrintConfig, "Print the configuration in effect, as a file, and exit."},
    {"check-config", CommandLine::Action::kCheckConfig,
     "Check everything, print OK or all errors, and exit with 0 or 2."},
    {"version", CommandLine::Action::kVersion, "Print the version and exit."},
    {"help", CommandLine::Action::kHelp, "Print this and exit."},
};
constexpr absl::string_view kConfigHelp =
    "Read this file: lines of KEY: VALUE, as --print-config writes them. Flags override it.";

const Descriptor* ConfigType() { return DaemonConfig::descriptor(); }
const Knob& KnobOf(const FieldDescriptor* field) { return field->options().GetExtension(config::v1::knob); }
std::string FlagOf(const FieldDescriptor* field) { return absl::StrReplaceAll(field->name(), {{"_", "-"}}); }
std::string Quoted(absl::string_view text) { return absl::StrCat("\"", text, "\""); }

// Where each value of a configuration comes from: "FILE:LINE:COLUMN: ", "--FLAG: " or nothing.
class Origins {
 public:
  void Set(const FieldDescriptor* field, int index, std::string origin) {
    std::vector<std::string>& origins = origins_[field];
    if (static_cast<int>(origins.size()) <= index) origins.resize(index + 1);
    origins[index] = std::move(origin);
  }
  std::string Get(const FieldDescriptor* field, int index = 0) const {
    auto it = origins_.find(field);
    return it == origins_.end() || index >= static_cast<int>(it->second.size()) ? "" : it->second[index];
  }

 private:
  std::map<const FieldDescriptor*, std::vector<std::string>> origins_;
};

// ---- suggestions ----

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// "; did you mean X?" for the candidate that is nearest, if one is near: at most a third of its letters differ.
std::string Suggestion(absl::string_view name, const std::vector<std::string>& candidates,
                       absl::string_view prefix = "") {
  constexpr size_t kLongestName = 64;
  const std::string* best = nullptr;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(name.substr(0, kLongestName), candidate);
    if (distance < best_distance && distance <= std::max<size_t>(2, candidate.size() / 3)) {
      best = &candidate;
      best_distance = distance;
    }
  }
  return best == nullptr ? "" : absl::StrCat("; did you mean ", prefix, *best, "?");
}

std::vector<std::string> FieldNames(const Descriptor* type) {
  std::vector<std::string> names;
  for (int i = 0; i < type->field_count(); ++i) names.push_back(type->field(i)->name());
  return names;
}

// ---- text format ----

// Byte offset of a place that the tokenizer names. It counts from 0, and a tab as up to the next multiple of 8.
size_t OffsetOf(absl::string_view text, int line, int column) {
  size_t offset = 0;
  for (; line > 0 && offset < text.size(); ++offset) {
    if (text[offset] == '\n') --line;
  }
  for (int at = 0; at < column && offset < text.size() && text[offset] != '\n'; ++offset) {
    at = text[offset] == '\t' ? (at / 8 + 1) * 8 : at + 1;
  }
  return offset;
}

// "LINE:COLUMN" of a byte, counted from 1.
std::string PlaceOf(absl::string_view text, size_t offset) {
  const absl::string_view before = text.substr(0, offset);
  const size_t line_start = before.rfind('\n') == absl::string_view::npos ? 0 : before.rfind('\n') + 1;
  return absl::StrCat(std::count(before.begin(), before.end(), '\n') + 1, ":", offset - line_start + 1);
}

// Turns the parser's complaints into errors that begin with place and key.
class ErrorCollector final : public google::protobuf::io::ErrorCollector {
 public:
  ErrorCollector(absl::string_view source, absl::string_view text, Errors* errors)
      : source_(source), text_(text), errors_(errors) {}

  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    if (line < 0) return errors_->push_back(absl::StrCat(source_, ": ", message));
    const size_t offset = OffsetOf(text_, line, column);
    const size_t start = text_.rfind('\n', offset == 0 ? 0 : offset - 1);
    absl::string_view content = text_.substr(start == absl::string_view::npos ? 0 : start + 1);
    content = absl::StripAsciiWhitespace(content.substr(0, content.find('\n')));
    errors_->push_back(absl::StrCat(source_, ":", PlaceOf(text_, offset), ": ", message, " (in \"", content, "\")"));
  }

  // With AllowUnknownField the parser warns of an unknown key and goes on, so that one run finds them all. It points
  // behind the key.
  void AddWarning(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    const std::vector<std::string> parts = absl::StrSplit(message, '"');
    const Descriptor* type = parts.size() == 5 && absl::StrContains(parts[2], "no field named")
                                 ? DescriptorPool::generated_pool()->FindMessageTypeByName(parts[1])
                                 : nullptr;
    if (type == nullptr) return AddError(line, column, message);
    const std::string& key = parts[3];
    size_t offset = OffsetOf(text_, line, column);
    if (size_t start = text_.substr(0, offset).rfind(key); start != absl::string_view::npos) offset = start;
    errors_->push_back(absl::StrCat(source_, ":", PlaceOf(text_, offset), ": unknown key ", Quoted(key),
                                    type == ConfigType() ? "" : absl::StrCat(" in ", type->name()),
                                    Suggestion(key, FieldNames(type))));
  }

 private:
  const absl::string_view source_;
  const absl::string_view text_;
  Errors* const errors_;
};

// False: the text could not be read to its end.
bool ParseText(absl::string_view source, const std::string& text, google::protobuf::Message* message,
               TextFormat::ParseInfoTree* places, Errors* errors) {
  ErrorCollector collector(source, text, errors);
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  parser.AllowUnknownField(true);
  if (places != nullptr) parser.WriteLocationsTo(places);
  return parser.ParseFromString(text, message);
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return absl::InvalidArgumentError(strerror(errno));
  std::string text(kMaxFileBytes + 1, '\0');
  size_t size = 0;
  int error = 0;
  while (size < text.size()) {
    const ssize_t count = read(descriptor, text.data() + size, text.size() - size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) error = errno;
    if (count <= 0) break;
    size += count;
  }
  close(descriptor);
  if (error != 0) return absl::InvalidArgumentError(strerror(error));
  if (size > kMaxFileBytes) return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxFileBytes, " bytes"));
  text.resize(size);
  return text;
}

// False: values may be missing, so that checking them makes no sense.
bool LoadFile(const std::string& path, DaemonConfig* config, Origins* origins, Errors* errors) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) {
    errors->push_back(absl::StrCat(path, ": cannot read: ", text.status().message()));
    return false;
  }
  TextFormat::ParseInfoTree places;
  const bool complete = ParseText(path, *text, config, &places, errors);
  for (int i = 0; i < ConfigType()->field_count(); ++i) {
    const FieldDescriptor* field = ConfigType()->field(i);
    const int count = field->is_repeated() ? config->GetReflection()->FieldSize(*config, field) : 1;
    for (int index = 0; index < count; ++index) {
      const TextFormat::ParseLocation place = places.GetLocation(field, field->is_repeated() ? index : -1);
      if (place.line < 0) continue;
      origins->Set(field, index,
                   absl::StrCat(path, ":", PlaceOf(*text, OffsetOf(*text, place.line, place.column)), ": "));
    }
  }
  return complete;
}

// ---- flags ----

struct Flag {
  const FieldDescriptor* field;
  std::string value;
};

struct Flags {
  std::set<CommandLine::Action> actions;
  std::optional<std::string> config_file;
  std::vector<Flag> values;
};

std::string UnknownFlag(absl::string_view name) {
  std::vector<std::string> candidates = {"config"};
  for (const Command& command : kCommands) candidates.emplace_back(command.flag);
  for (int i = 0; i < ConfigType()->field_count(); ++i) candidates.push_back(FlagOf(ConfigType()->field(i)));
  return absl::StrCat("unknown flag --", name, Suggestion(name, candidates, "--"));
}

// The bool that --noNAME or --no-NAME turns off, or null.
const FieldDescriptor* NegatedField(absl::string_view key) {
  for (absl::string_view prefix : {"no_", "no"}) {
    if (!absl::StartsWith(key, prefix)) continue;
    const FieldDescriptor* field = ConfigType()->FindFieldByName(std::string(key.substr(prefix.size())));
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_BOOL) return field;
  }
  return nullptr;
}

Flags ReadFlags(int argc, const char* const* argv, Errors* errors) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (argument == "-h") argument = "--help";
    if (!absl::StartsWith(argument, "--") || argument.size() == 2) {
      errors->push_back(absl::StrCat("unexpected argument ", Quoted(argument)));
      continue;
    }
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(2, equals == absl::string_view::npos ? equals : equals - 2);
    std::optional<std::string> value;
    if (equals != absl::string_view::npos) value = std::string(argument.substr(equals + 1));
    const std::string key = absl::StrReplaceAll(name, {{"-", "_"}});

    const auto command = std::find_if(std::begin(kCommands), std::end(kCommands), [&](const Command& candidate) {
      return absl::StrReplaceAll(candidate.flag, {{"-", "_"}}) == key;
    });
    const FieldDescriptor* field = ConfigType()->FindFieldByName(key);
    const FieldDescriptor* negated = field == nullptr ? NegatedField(key) : nullptr;
    if (command != std::end(kCommands) || negated != nullptr) {
      if (value.has_value()) {
        errors->push_back(absl::StrCat("--", name, ": takes no value, got ", Quoted(*value)));
      } else if (negated != nullptr) {
        flags.values.push_back({negated, "false"});
      } else {
        flags.actions.insert(command->action);
      }
      continue;
    }
    if (field == nullptr && key != "config") {
      errors->push_back(UnknownFlag(name));
      continue;
    }
    if (!value.has_value() && field != nullptr && field->type() == FieldDescriptor::TYPE_BOOL) value = "true";
    if (!value.has_value() && i + 1 < argc && !absl::StartsWith(argv[i + 1], "--")) value = argv[++i];
    if (!value.has_value()) {
      errors->push_back(absl::StrCat("--", name, ": needs a value"));
    } else if (field != nullptr) {
      flags.values.push_back({field, *std::move(value)});
    } else if (flags.config_file.has_value()) {
      errors->push_back("--config: may be given once only");
    } else {
      flags.config_file = std::move(value);
    }
  }
  return flags;
}

void ApplyPool(const Flag& flag, const std::string& flag_name, DaemonConfig* config, Origins* origins, Errors* errors) {
  v1::PoolSpec pool;
  if (!ParseText(flag_name, flag.value, &pool, nullptr, errors)) return;
  const auto same_name = [&](const v1::PoolSpec& other) { return other.name() == pool.name(); };
  auto* pools = config->mutable_pool();
  auto target = std::find_if(pools->begin(), pools->end(), same_name);
  const int index = static_cast<int>(target - pools->begin());
  // Two flags of one name are a mistake, which validation reports; a flag and the file are not.
  if (target != pools->end() && !absl::StartsWith(origins->Get(flag.field, index), "--")) {
    *target = std::move(pool);
    origins->Set(flag.field, index, flag_name + ": ");
  } else {
    *config->add_pool() = std::move(pool);
    origins->Set(flag.field, config->pool_size() - 1, flag_name + ": ");
  }
}

void ApplyFlag(const Flag& flag, DaemonConfig* config, Origins* origins, Errors* errors) {
  const FieldDescriptor* field = flag.field;
  const Reflection* reflection = config->GetReflection();
  const std::string flag_name = absl::StrCat("--", FlagOf(field));
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ApplyPool(flag, flag_name, config, origins, errors);
    case FieldDescriptor::CPPTYPE_STRING:
      reflection->SetString(config, field, flag.value);
      break;
    case FieldDescriptor::CPPTYPE_BOOL: {
      bool value = false;
      if (!absl::SimpleAtob(flag.value, &value)) {
        errors->push_back(absl::StrCat(flag_name, ": ", Quoted(flag.value), " is not true or false"));
        return;
      }
      reflection->SetBool(config, field, value);
      break;
    }
    default: {
      int64_t value = 0;
      if (!absl::SimpleAtoi(flag.value, &value)) {
        errors->push_back(absl::StrCat(flag_name, ": ", Quoted(flag.value), " is not an integer from ",
                                       KnobOf(field).min(), " to ", KnobOf(field).max()));
        return;
      }
      reflection->SetInt64(config, field, value);
      break;
    }
  }
  origins->Set(field, 0, flag_name + ": ");
}

// ---- validation ----

struct Address {
  std::string host;
  int port = 0;
};

std::optional<Address> ParseAddress(absl::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return std::nullopt;
  absl::string_view host = text.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]") || !absl::StrContains(host, ':')) return std::nullopt;
  } else if (absl::StrContains(host, ':')) {
    return std::nullopt;
  }
  const absl::string_view port = text.substr(colon + 1);
  const bool digits = std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
  Address address{std::string(host), 0};
  if (host.empty() || !digits || !absl::SimpleAtoi(port, &address.port) || address.port > 65535) return std::nullopt;
  return address;
}

bool IsLoopback(const std::string& host) {
  if (host == "localhost" || host == "::1") return true;
  const std::vector<std::string> parts = absl::StrSplit(host, '.');
  return parts.size() == 4 && parts[0] == "127" && std::all_of(parts.begin(), parts.end(), [](const std::string& part) {
           int value = -1;
           return absl::SimpleAtoi(part, &value) && value >= 0 && value <= 255;
         });
}

class Validator {
 public:
  Validator(const DaemonConfig& config, const Origins& origins, Errors* errors)
      : config_(config), origins_(origins), errors_(errors) {}

  void Run() {
    for (int i = 0; i < ConfigType()->field_count(); ++i) CheckField(ConfigType()->field(i));
    CheckListeners();
    CheckTls();
    CheckAddress(DaemonConfig::kMetricsAddressFieldNumber, config_.metrics_address());
    CheckDevice();
    CheckCopies();
    CheckPools();
  }

 private:
  static const FieldDescriptor* Field(int number) { return ConfigType()->FindFieldByNumber(number); }

  void Add(const FieldDescriptor* field, int index, absl::string_view message) {
    errors_->push_back(absl::StrCat(origins_.Get(field, index), message));
  }
  void Add(int number, absl::string_view message) { Add(Field(number), 0, message); }

  void CheckField(const FieldDescriptor* field) {
    const Knob& knob = KnobOf(field);
    const Reflection* reflection = config_.GetReflection();
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
      const int64_t value = reflection->GetInt64(config_, field);
      if (value >= knob.min() && value <= knob.max()) return;
      Add(field, 0,
          absl::StrCat(field->name(), " ", value, " is out of range: ", knob.min(), " to ", knob.max(),
                       " are allowed"));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      const std::string value = reflection->GetString(config_, field);
      const auto& choices = knob.choice();
      if (static_cast<int64_t>(value.size()) > knob.max_length()) {
        Add(field, 0,
            absl::StrCat(field->name(), " ", Quoted(value), " has ", value.size(), " bytes: at most ",
                         knob.max_length(), " are allowed"));
      } else if (std::any_of(value.begin(), value.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
        Add(field, 0, absl::StrCat(field->name(), " has a control character"));
      } else if (!choices.empty() && std::find(choices.begin(), choices.end(), value) == choices.end()) {
        Add(field, 0,
            absl::StrCat(field->name(), " ", Quoted(value), " is not one of ", absl::StrJoin(choices, ", "),
                         Suggestion(value, {choices.begin(), choices.end()})));
      }
    }
  }

  std::optional<Address> CheckAddress(int number, const std::string& text) {
    if (text.empty()) return std::nullopt;
    std::optional<Address> address = ParseAddress(text);
    if (!address.has_value()) {
      Add(number, absl::StrCat(Field(number)->name(), " ", Quoted(text),
                               " is not HOST:PORT or [IPV6]:PORT with a port from 0 to 65535"));
    }
    return address;
  }

  void CheckListeners() {
    if (config_.socket_path().empty() && config_.tcp_address().empty()) {
      Add(DaemonConfig::kSocketPathFieldNumber, "socket_path and tcp_address are both empty: one is needed to serve");
    }
    const std::optional<Address> tcp = CheckAddress(DaemonConfig::kTcpAddressFieldNumber, config_.tcp_address());
    if (!tcp.has_value()) return;
    const bool tls = !config_.tls_cert_file().empty() || !config_.tls_key_file().empty();
    if (tls && config_.insecure_loopback()) {
      Add(DaemonConfig::kInsecureLoopbackFieldNumber, "insecure_loopback is set, and so is TLS: choose one");
    } else if (!tls && !config_.insecure_loopback()) {
      Add(DaemonConfig::kTcpAddressFieldNumber,
          absl::StrCat("tcp_address ", Quoted(config_.tcp_address()),
                       " needs tls_cert_file and tls_key_file, or, on a loopback address, insecure_loopback"));
    } else if (!tls && !IsLoopback(tcp->host)) {
      Add(DaemonConfig::kTcpAddressFieldNumber,
          absl::StrCat("tcp_address ", Quoted(config_.tcp_address()),
                       " is not a loopback address: without tls_cert_file and tls_key_file it is refused, "
                       "also with insecure_loopback"));
    }
  }

  void CheckTls() {
    const bool cert = !config_.tls_cert_file().empty();
    const bool key = !config_.tls_key_file().empty();
    if (cert && !key) Add(DaemonConfig::kTlsCertFileFieldNumber, "tls_cert_file is set without tls_key_file");
    if (key && !cert) Add(DaemonConfig::kTlsKeyFileFieldNumber, "tls_key_file is set without tls_cert_file");
    if (!config_.tls_client_ca_file().empty() && !cert && !key) {
      Add(DaemonConfig::kTlsClientCaFileFieldNumber,
          "tls_client_ca_file is set without tls_cert_file and tls_key_file");
    }
    CheckReadable(DaemonConfig::kTlsCertFileFieldNumber, config_.tls_cert_file());
    CheckReadable(DaemonConfig::kTlsKeyFileFieldNumber, config_.tls_key_file());
    CheckReadable(DaemonConfig::kTlsClientCaFileFieldNumber, config_.tls_client_ca_file());
  }

  void CheckReadable(int number, const std::string& path) {
    if (path.empty() || access(path.c_str(), R_OK) == 0) return;
    Add(number, absl::StrCat(Field(number)->name(), " ", Quoted(path), " cannot be read: ", strerror(errno)));
  }

  void CheckDevice() {
    if (absl::Status status = CheckDeviceForm(config_.device()); !status.ok()) {
      Add(DaemonConfig::kDeviceFieldNumber, absl::StrCat("device ", status.message()));
    }
  }

  // Every launch is enqueued by its call, and a device takes about a thousand before the call waits: small pieces would
  // make thousands of a long copy, and of the commits of a large batch.
  void CheckCopies() {
    constexpr int64_t kMinBytes = 1 << 20;
    for (const int number : {DaemonConfig::kMaxBulkCopyBytesFieldNumber, DaemonConfig::kMaxStepCopyBytesFieldNumber}) {
      const int64_t bytes = config_.GetReflection()->GetInt64(config_, Field(number));
      if (bytes <= 0 || bytes >= kMinBytes) continue;
      Add(number, absl::StrCat(Field(number)->name(), " ", bytes, " is out of range: 0, or ", kMinBytes,
                               " at least, are allowed"));
    }
  }

  void CheckPools() {
    const FieldDescriptor* field = Field(DaemonConfig::kPoolFieldNumber);
    std::set<std::string> names;
    for (int i = 0; i < config_.pool_size(); ++i) {
      const v1::PoolSpec& pool = config_.pool(i);
      core::PoolSpec spec;
      spec.name = pool.name();
      spec.layers = pool.layers();
      spec.row_layout = static_cast<core::RowLayout>(pool.row_layout());
      spec.row_bytes = pool.row_bytes();
      spec.v_row_bytes = pool.v_row_bytes();
      spec.block_rows = pool.block_rows();
      spec.prefix_rows = pool.prefix_rows();
      spec.blocks = pool.blocks();
      const std::string origin = absl::StrCat("pool ", Quoted(pool.name()), ": ");
      if (absl::Status status = spec.Normalize(); !status.ok()) Add(field, i, absl::StrCat(origin, status.message()));
      if (!names.insert(pool.name()).second) Add(field, i, absl::StrCat(origin, "the name is given twice"));
    }
  }

  const DaemonConfig& config_;
  const Origins& origins_;
  Errors* const errors_;
};

absl::Status ToStatus(const Errors& errors) {
  return errors.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(errors, "\n"));
}

// ---- explaining ----

// "67108864 (64 MiB)" where the value is a round number of bytes.
std::string WithUnit(const FieldDescriptor* field, int64_t value) {
  std::string text = absl::StrCat(value);
  if (!absl::EndsWith(field->name(), "_bytes") || value == 0) return text;
  constexpr absl::string_view kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (unit + 1 < std::size(kUnits) && value % 1024 == 0) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? text : absl::StrCat(text, " (", value, " ", kUnits[unit], ")");
}

// Default and bounds, as a sentence or two.
std::string Bounds(const FieldDescriptor* field) {
  const Knob& knob = KnobOf(field);
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat("Default: ", WithUnit(field, field->default_value_int64()), ". ", WithUnit(field, knob.min()),
                          " to ", WithUnit(field, knob.max()), ".");
    case FieldDescriptor::CPPTYPE_BOOL:
      return absl::StrCat("Default: ", field->default_value_bool() ? "true" : "false", ".");
    case FieldDescriptor::CPPTYPE_STRING:
      return absl::StrCat(
          "Default: ", Quoted(field->default_value_string()), ".",
          knob.choice().empty() ? "" : absl::StrCat(" One of ", absl::StrJoin(knob.choice(), ", "), "."));
    default:
      return "Default: none.";
  }
}

// Appends the words, broken into lines of at most kHelpColumns that begin with `indent`.
void AppendWrapped(absl::string_view words, absl::string_view indent, std::string* out) {
  size_t column = 0;
  for (absl::string_view word : absl::StrSplit(words, ' ', absl::SkipEmpty())) {
    if (column > 0 && column + 1 + word.size() > kHelpColumns) {
      out->append("\n");
      column = 0;
    }
    absl::StrAppend(out, column == 0 ? indent : " ", word);
    column += (column == 0 ? indent.size() : 1) + word.size();
  }
  if (column > 0) out->append("\n");
}

const char* ValueName(const FieldDescriptor* field) {
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      return "=INTEGER";
    case FieldDescriptor::CPPTYPE_STRING:
      return "=STRING";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "[=true|false]";
    default:
      return "='name: \"...\" layers: ...'";
  }
}

void PrintField(const DaemonConfig& config, const FieldDescriptor* field, std::string* out) {
  TextFormat::Printer printer;
  std::string value;
  if (!field->is_repeated()) {
    printer.PrintFieldValueToString(config, field, -1, &value);
    absl::StrAppend(out, field->name(), ": ", value, "\n");
    return;
  }
  printer.SetInitialIndentLevel(1);
  for (int i = 0; i < config.GetReflection()->FieldSize(config, field); ++i) {
    printer.PrintToString(config.GetReflection()->GetRepeatedMessage(config, field, i), &value);
    absl::StrAppend(out, field->name(), " {\n", value, "}\n");
  }
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  Errors errors;
  const Flags flags = ReadFlags(argc, argv, &errors);
  CommandLine command_line;
  for (CommandLine::Action action : {CommandLine::Action::kHelp, CommandLine::Action::kVersion}) {
    if (flags.actions.contains(action)) {
      command_line.action = action;
      return command_line;
    }
  }
  if (flags.actions.size() > 1) errors.push_back("--print-config and --check-config exclude each other");
  if (!flags.actions.empty()) command_line.action = *flags.actions.begin();

  Origins origins;
  bool complete = true;
  if (flags.config_file.has_value()) {
    complete = LoadFile(*flags.config_file, &command_line.config, &origins, &errors);
  }
  for (const Flag& flag : flags.values) ApplyFlag(flag, &command_line.config, &origins, &errors);
  if (complete) Validator(command_line.config, origins, &errors).Run();
  if (absl::Status status = ToStatus(errors); !status.ok()) return status;
  return command_line;
}

std::string ActionOutput(const CommandLine& command_line) {
  switch (command_line.action) {
    case CommandLine::Action::kRun:
      return "";
    case CommandLine::Action::kPrintConfig:
      return PrintConfig(command_line.config);
    case CommandLine::Action::kCheckConfig:
      return "OK\n";
    case CommandLine::Action::kVersion:
      return absl::StrCat("stokerd ", Version(), "\n");
    case CommandLine::Action::kHelp:
      return HelpText();
  }
  return "";
}

std::string PrintConfig(const DaemonConfig& config) {
  std::string out = absl::StrCat("# Configuration of stokerd ", Version(), ".\n");
  std::string group;
  for (int i = 0; i < ConfigType()->field_count(); ++i) {
    const FieldDescriptor* field = ConfigType()->field(i);
    const Knob& knob = KnobOf(field);
    if (group != knob.group()) {
      group = knob.group();
      absl::StrAppend(&out, "\n# ---- ", group, " ----\n");
    }
    out.append("\n");
    AppendWrapped(knob.help(), "# ", &out);
    AppendWrapped(Bounds(field), "# ", &out);
    PrintField(config, field, &out);
  }
  return out;
}

std::string HelpText() {
  std::string out = absl::StrCat("stokerd ", Version(),
                                 ": keeps hot the KV-cache rows that sparse-attention decoders need next.\n\n"
                                 "usage: stokerd [--config FILE] [--FLAG=VALUE | --FLAG VALUE] ...\n\n"
                                 "Each flag is also a key of the configuration file: --max-sessions is max_sessions.\n"
                                 "A truth value X is set by --X or --X=true, and unset by --noX or --X=false.\n");
  absl::StrAppend(&out, "\nActions:\n  --config=FILE\n");
  AppendWrapped(kConfigHelp, "      ", &out);
  for (const Command& command : kCommands) {
    absl::StrAppend(&out, "  --", command.flag, "\n");
    AppendWrapped(command.help, "      ", &out);
  }
  std::string group;
  for (int i = 0; i < ConfigType()->field_count(); ++i) {
    const FieldDescriptor* field = ConfigType()->field(i);
    const Knob& knob = KnobOf(field);
    if (group != knob.group()) {
      group = knob.group();
      absl::StrAppend(&out, "\n", group, ":\n");
    }
    absl::StrAppend(&out, "  --", FlagOf(field), ValueName(field), "\n");
    AppendWrapped(knob.help(), "      ", &out);
    AppendWrapped(Bounds(field), "      ", &out);
  }
  return out;
}

const char* Version() { return STOKER_VERSION; }

absl::Status ValidateConfig(const DaemonConfig& config) {
  Errors errors;
  Validator(config, Origins(), &errors).Run();
  return ToStatus(errors);
}

void ResolveAutomaticValues(DaemonConfig* config) {
  if (config->cpu_threads() == 0) config->set_cpu_threads(std::max(1u, std::thread::hardware_concurrency()));
  if (config->max_pool_bytes() == 0) {
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    config->set_max_pool_bytes(static_cast<int64_t>(std::min(kernels::ReadAvailableMemory().bytes, kMost)) / 5 * 4);
  }
}

}  // namespace stoker::server
