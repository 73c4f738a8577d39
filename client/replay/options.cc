#include "client/replay/options.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/replay/cuda/gpu_rows.h"
#include "client/replay/device_option.h"
#include "client/replay/trace.h"

namespace stoker::replay {
namespace {

struct Switch {
  bool Options::*value;
};
struct Number {
  uint32_t Options::*value;
  uint32_t min = 0;
  uint32_t max = 0;
};
struct BigNumber {
  uint64_t Options::*value;
};
struct Real {
  double Options::*value;
  double max;
};
struct Text {
  std::string Options::*value;
};
struct Choice {
  std::string Options::*value;
  std::vector<const char*> choices;
};

struct Option {
  const char* name;
  std::variant<Switch, Number, BigNumber, Real, Text, Choice> kind;
  const char* help;
};

struct OptionGroup {
  const char* title;
  std::vector<Option> options;
};

constexpr uint32_t kMaxRowBytes = 65536;
constexpr uint32_t kDsv4RowBytes = 584, kDsv4ValueBytes = 576, kDsv4ScaleBytes = 8;
constexpr uint32_t kDefaultRowBytes = 656;
constexpr uint32_t kPrefixOnlyRowBytes = 4;
constexpr uint32_t kMaxHotRows = 32768;
constexpr uint32_t kMaxBatchRows = 4096;  // of a step
constexpr uint32_t kMaxQueryRows = 16;    // of a sequence; also the least --block-rows, the room for newest rows

const std::vector<OptionGroup>& Table() {
  static const std::vector<OptionGroup> table = {
      {"Daemon",
       {
           {"server", Text{&Options::server},
            "Address of a running daemon, unix:/path or host:port. Empty: a private one is started and stopped."},
           {"stokerd", Text{&Options::stokerd},
            "Program of the private daemon. Empty: the stokerd beside this program."},
           {"pool", Text{&Options::pool},
            "Name of the pool. It is created when it is absent, and then deleted at the end."},
           {"device", Text{&Options::device},
            "Where hot buffers are, and rows are made and checked: auto, cpu, cuda, cuda:N, cuda:GPU-UUID, cuda:all or "
            "a list. The private daemon gets it as its own --device; of a running one it chooses among its devices "
            "(cuda:N: its GPU number N). Engine processes take turns on several."},
       }},
      {"Requests",
       {
           {"trace", Text{&Options::trace},
            "File of requests, one JSON object a line (timestamp, input_length, output_length, hash_ids of 512-token "
            "blocks). Empty: requests are generated."},
           {"requests", Number{&Options::requests, 0, kMaxRequestNumber},
            "Requests to replay. 0: all of the trace, or 100 generated ones."},
           {"input-length", Number{&Options::input_rows, 4, 1000000}, "Generated requests: mean tokens of a prompt."},
           {"output-length", Number{&Options::output_rows, 4, 1000000},
            "Generated requests: mean tokens of an answer."},
           {"time-scale", Real{&Options::time_scale, 1e6},
            "Requests arrive at their timestamp times this. 0: as fast as they can be taken."},
           {"seed", BigNumber{&Options::seed}, "Seed of generated requests and of top-k entries."},
       }},
      {"Engines",
       {
           {"concurrency", Number{&Options::concurrency, 1, 4096}, "Sequences that an engine decodes at a time."},
           {"query-rows", Number{&Options::query_rows, 1, kMaxQueryRows},
            "Tokens of a sequence in a step (speculative decoding): their entries are resolved together, and from one "
            "to all of them, at random, are accepted. --query-rows times --top-k is at most --hot-rows."},
           {"padding-rows", Number{&Options::padding_rows, 0, kMaxBatchRows},
            "Rows without a sequence in the batch of every step, at random places between the others. With those of "
            "all sequences at most 4096."},
           {"engines", Number{&Options::engines, 1, 64},
            "Engine processes. Requests are dealt to them in turn; all share one pool."},
           {"ranks", Number{&Options::ranks, 1, 16},
            "Processes of one engine (tensor parallelism). All open the same sequences; the first one stores rows."},
           {"transfer", Choice{&Options::transfer, {"auto", "shared", "inline"}},
            "How rows and entries reach the daemon: through the session's memory, or inside the messages. auto: shared "
            "where the memory, the host's or a GPU's, can be mapped."},
           {"plane", Choice{&Options::plane, {"auto", "rpc", "server", "direct"}},
            "How steps are made: by calls, by doorbells in the session's memory, or by this program itself, which maps "
            "the whole pool for that. auto: direct where it can be had, then server, then rpc."},
           {"arena", Choice{&Options::arena, {"auto", "ipc", "descriptor"}},
            "How sessions share their memory: by a handle of CUDA IPC, which a GPU has alone, or by a descriptor, for "
            "which the daemon must be reached through a Unix socket. auto: a handle on a GPU, else a descriptor."},
       }},
      {"Model",
       {
           {"layers", Number{&Options::layers, 1, kMaxLayers}, "Layers."},
           {"groups", Number{&Options::groups, 1, kMaxLayers},
            "Index groups: layers that share their top-k entries. At most --layers."},
           {"row-layout", Choice{&Options::row_layout, {"linear", "split_kv", "dsv4_paged"}},
            "How rows lie in memory."},
           {"row-bytes", Number{&Options::row_bytes, 0, kMaxRowBytes},
            "Bytes of a row of one layer, or of its K part; a multiple of 4. 0: 656 (dsv4_paged: 584; with "
            "--prefix-only: "
            "4)."},
           {"v-row-bytes", Number{&Options::v_row_bytes, 0, kMaxRowBytes},
            "split_kv: bytes of the V part; a multiple of 4. 0: as --row-bytes."},
           {"top-k", Number{&Options::top_k, 1, 8192}, "Entries of a sequence, step and group."},
           {"hot-rows", Number{&Options::hot_rows, 0, kMaxHotRows},
            "Rows of a hot buffer, at least --query-rows times --top-k. 0: twice that."},
           {"index-space", Choice{&Options::index_space, {"position", "pool_row"}},
            "What entries name: positions of the sequence, or rows of the pool by its block table."},
           {"workload-model", Choice{&Options::workload_model, {"realistic", "drift", "fresh", "resident"}},
            "Which tokens are selected. realistic: published LRU miss rates, O(tokens) a step; drift: O(top_k) a step; "
            "fresh: none again before all others; resident: a random half of twice --top-k. Default: drift for "
            "replays, "
            "realistic for --write-workload."},
           {"drift-percent", Number{&Options::drift_percent, 0, 1000},
            "realistic: how much scores change from step to step and stay so; 100: as published."},
           {"white-percent", Number{&Options::white_percent, 0, 10000},
            "realistic: how much scores change for one step; 100: as published."},
       }},
      {"Pool",
       {
           {"pool-blocks", Number{&Options::pool_blocks, 0, (uint32_t{1} << 31) / kPrefixBlockRows - 1},
            "Size of the pool, in prefix blocks of 512 tokens. 0: room for everything, so that nothing is evicted."},
           {"block-rows", Number{&Options::block_rows, 16, 512}, "Rows of a block, a power of two. dsv4_paged: 64."},
       }},
      {"Output",
       {
           {"json", Switch{&Options::json}, "Print the result as one JSON object on the last line."},
           {"progress", Choice{&Options::progress, {"auto", "bar", "lines", "none"}},
            "auto: a bar on a terminal, otherwise a line every ten seconds."},
       }},
      {"Other things to do",
       {
           {"prefix-only", Switch{&Options::prefix_only},
            "Only admit, store and release each request, one after the other: measures the prefix hit ratio."},
           {"write-trace", Text{&Options::write_trace}, "Write the generated requests to this file and exit."},
           {"write-workload", Text{&Options::write_workload},
            "Write a workload file of --steps, --rows, --context, --top-k, --hot-rows and --row-bytes and exit."},
           {"steps", Number{&Options::steps, 1, 1000000}, "Steps of the workload."},
           {"rows", Number{&Options::rows, 1, 4096}, "Sequences of the workload."},
           {"context", Number{&Options::context, 0, kMaxSequenceRows}, "Tokens of each sequence. 0: 32 times --top-k."},
           {"workload", Text{&Options::workload}, "Drive a workload file through the daemon instead of requests."},
           {"dump-slots", Text{&Options::dump_slots}, "With --workload: write the slot of every entry to this file."},
       }},
  };
  return table;
}

const Option* Find(absl::string_view name) {
  for (const OptionGroup& group : Table()) {
    for (const Option& option : group.options) {
      if (name == option.name) return &option;
    }
  }
  return nullptr;
}

absl::Status BadValue(absl::string_view name, absl::string_view value, absl::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, " is \"", value, "\"; it must be ", limit));
}

// Assigns a value to its option. Visits the kinds.
struct Assign {
  absl::Status operator()(const Switch& kind) const {
    if (value != "true" && value != "false") return BadValue(name, value, "true or false");
    options->*kind.value = value == "true";
    return absl::OkStatus();
  }
  absl::Status operator()(const Number& kind) const {
    uint64_t number = 0;
    if (!absl::SimpleAtoi(value, &number) || number < kind.min || number > kind.max) {
      return BadValue(name, value, absl::StrCat("an integer from ", kind.min, " to ", kind.max));
    }
    options->*kind.value = static_cast<uint32_t>(number);
    return absl::OkStatus();
  }
  absl::Status operator()(const BigNumber& kind) const {
    if (!absl::SimpleAtoi(value, &(options->*kind.value))) {
      return BadValue(name, value, "an integer from 0 to 18446744073709551615");
    }
    return absl::OkStatus();
  }
  absl::Status operator()(const Real& kind) const {
    double number = 0;
    if (!absl::SimpleAtod(value, &number) || !(number >= 0 && number <= kind.max)) {
      return BadValue(name, value, absl::StrCat("a number from 0 to ", kind.max));
    }
    options->*kind.value = number;
    return absl::OkStatus();
  }
  absl::Status operator()(const Text& kind) const {
    options->*kind.value = std::string(value);
    return absl::OkStatus();
  }
  absl::Status operator()(const Choice& kind) const {
    if (std::find(kind.choices.begin(), kind.choices.end(), value) == kind.choices.end()) {
      return BadValue(name, value, absl::StrJoin(kind.choices, ", "));
    }
    options->*kind.value = std::string(value);
    return absl::OkStatus();
  }

  Options* options;
  absl::string_view name;
  absl::string_view value;
};

absl::Status Conflict(absl::string_view message) { return absl::InvalidArgumentError(message); }

absl::Status ChooseAction(Options& o) {
  const struct {
    bool wanted;
    Options::Action action;
    const char* name;
  } actions[] = {
      {o.prefix_only, Options::Action::kPrefixOnly, "--prefix-only"},
      {!o.workload.empty(), Options::Action::kDriveWorkload, "--workload"},
      {!o.write_workload.empty(), Options::Action::kWriteWorkload, "--write-workload"},
      {!o.write_trace.empty(), Options::Action::kWriteTrace, "--write-trace"},
  };
  const char* chosen = nullptr;
  for (const auto& candidate : actions) {
    if (!candidate.wanted) continue;
    if (chosen != nullptr) return Conflict(absl::StrCat(chosen, " and ", candidate.name, " exclude each other"));
    chosen = candidate.name;
    o.action = candidate.action;
  }
  if (!o.dump_slots.empty() && o.workload.empty()) return Conflict("--dump-slots needs --workload");
  if (!o.write_trace.empty() && !o.trace.empty()) return Conflict("--write-trace and --trace exclude each other");
  const bool one_process = o.action == Options::Action::kPrefixOnly || o.action == Options::Action::kDriveWorkload;
  if (one_process && o.by_pool_row()) {
    return Conflict(absl::StrCat(chosen, " and --index-space pool_row exclude each other"));
  }
  if (one_process && (o.engines != 1 || o.ranks != 1)) {
    return Conflict(absl::StrCat(chosen, " runs in one process: --engines is ", o.engines, ", --ranks is ", o.ranks,
                                 "; both must be 1"));
  }
  return absl::OkStatus();
}

absl::Status CompleteRows(Options& o) {
  const bool dsv4 = o.row_layout == "dsv4_paged";
  if (o.row_bytes == 0) {
    o.row_bytes = dsv4 ? kDsv4RowBytes : o.prefix_only ? kPrefixOnlyRowBytes : kDefaultRowBytes;
  }
  if (o.row_bytes % 4 != 0) return BadValue("row-bytes", absl::StrCat(o.row_bytes), "a multiple of 4");
  if (dsv4 && o.row_bytes != kDsv4RowBytes) {
    return BadValue("row-bytes", absl::StrCat(o.row_bytes), "584 with --row-layout dsv4_paged");
  }
  if (o.row_layout == "split_kv") {
    if (o.v_row_bytes == 0) o.v_row_bytes = o.row_bytes;
    if (o.v_row_bytes % 4 != 0) return BadValue("v-row-bytes", absl::StrCat(o.v_row_bytes), "a multiple of 4");
  } else if (o.v_row_bytes != 0) {
    return BadValue("v-row-bytes", absl::StrCat(o.v_row_bytes), "0 unless --row-layout is split_kv");
  }
  if ((o.block_rows & (o.block_rows - 1)) != 0) {
    return BadValue("block-rows", absl::StrCat(o.block_rows), "a power of two");
  }
  if (dsv4 && o.block_rows != 64) {
    return BadValue("block-rows", absl::StrCat(o.block_rows), "64 with --row-layout dsv4_paged");
  }
  return absl::OkStatus();
}

absl::Status CheckDevice(const Options& o) {
  if (absl::Status form = CheckDeviceForm(o.device); !form.ok()) return BadValue("device", o.device, form.message());
  // The daemon beside this program is of the same build. A running one may have GPUs all the same, but not share their
  // memory with this one.
  if (!NamesGpu(o.device) || HasGpuRows() || (!o.server.empty() && o.transfer != "shared")) return absl::OkStatus();
  return BadValue("device", o.device,
                  "auto or cpu: this build of stoker-replay has no CUDA (a running daemon's GPUs can be had with "
                  "--server and --transfer inline)");
}

absl::Status CheckPlane(const Options& o) {
  if (o.plane != "server" && o.plane != "direct") return absl::OkStatus();
  if (o.transfer == "inline") {
    return BadValue("plane", o.plane,
                    absl::StrCat("auto or rpc with --transfer inline: the ", o.plane, " plane is in shared memory"));
  }
  if (o.prefix_only) return BadValue("plane", o.plane, "auto or rpc with --prefix-only, which makes no steps");
  return absl::OkStatus();
}

// Fills in hot_rows, and checks what a step is made of.
absl::Status CompleteBatch(Options& o) {
  if (o.action != Options::Action::kReplay && (o.query_rows != 1 || o.padding_rows != 0)) {
    return Conflict(absl::StrCat("--query-rows is ", o.query_rows, ", --padding-rows is ", o.padding_rows,
                                 "; they are for requests that are decoded, and must be 1 and 0"));
  }
  if (o.action == Options::Action::kReplay && o.batch_rows() > kMaxBatchRows) {
    return Conflict(absl::StrCat("--concurrency is ", o.concurrency, ", --query-rows is ", o.query_rows,
                                 ", --padding-rows is ", o.padding_rows, "; a batch would have ", o.batch_rows(),
                                 " rows, and must have at most ", kMaxBatchRows));
  }
  if (o.query_rows != 1 && o.by_pool_row()) {
    // Every row's newest token answers with the first of the newest rows there (kernels/README.md).
    return BadValue("query-rows", absl::StrCat(o.query_rows), "1 with --index-space pool_row");
  }
  const uint32_t least = o.query_rows * o.top_k;
  if (o.hot_rows == 0) o.hot_rows = std::min(2 * least, kMaxHotRows);
  if (o.hot_rows < least) {
    return BadValue("hot-rows", absl::StrCat(o.hot_rows),
                    o.query_rows == 1 ? absl::StrCat("at least --top-k, ", o.top_k)
                                      : absl::StrCat("at least --query-rows times --top-k, ", least));
  }
  return absl::OkStatus();
}

// Fills in the defaults that depend on other options, and checks what must hold between them.
absl::Status Complete(Options& o) {
  if (absl::Status status = ChooseAction(o); !status.ok()) return status;
  if (absl::Status status = CompleteRows(o); !status.ok()) return status;
  if (absl::Status status = CheckDevice(o); !status.ok()) return status;
  if (absl::Status status = CheckPlane(o); !status.ok()) return status;
  if (o.groups > o.layers) {
    return BadValue("groups", absl::StrCat(o.groups), absl::StrCat("at most --layers, ", o.layers));
  }
  if (absl::Status status = CompleteBatch(o); !status.ok()) return status;
  if (o.context == 0) o.context = 32 * o.top_k;
  if (o.context <= o.top_k) {
    return BadValue("context", absl::StrCat(o.context), absl::StrCat("above --top-k, ", o.top_k));
  }
  if (o.workload_model.empty()) {
    const bool file = o.action == Options::Action::kWriteWorkload;
    o.workload_model = std::string(ModelName(file ? ModelKind::kRealistic : ModelKind::kDrift));
  }
  if (o.model() != ModelKind::kRealistic) {
    constexpr absl::string_view kOnly = "100, but with --workload-model=realistic";
    if (o.drift_percent != 100) return BadValue("drift-percent", absl::StrCat(o.drift_percent), kOnly);
    if (o.white_percent != 100) return BadValue("white-percent", absl::StrCat(o.white_percent), kOnly);
  }
  return absl::OkStatus();
}

}  // namespace

RowShape Options::row_shape() const {
  if (row_layout == "split_kv") return {{row_bytes, v_row_bytes}};
  if (row_layout == "dsv4_paged") return {{kDsv4ValueBytes, kDsv4ScaleBytes}};
  return {{row_bytes, 0}};
}

ModelKind Options::model() const { return ParseModelKind(workload_model).value_or(ModelKind::kDrift); }

absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    if (argument == "--help" || argument == "-h") {
      options.action = Options::Action::kHelp;
      return options;
    }
    if (argument == "--version") {
      options.action = Options::Action::kVersion;
      return options;
    }
    if (!absl::ConsumePrefix(&argument, "--")) {
      return absl::InvalidArgumentError(absl::StrCat("\"", argument, "\" is not an option; options begin with --"));
    }
    const size_t equals = argument.find('=');
    absl::string_view name = argument.substr(0, equals);
    std::optional<absl::string_view> value;
    if (equals != absl::string_view::npos) value = argument.substr(equals + 1);

    const Option* option = Find(name);
    if (option == nullptr && !value.has_value() && absl::ConsumePrefix(&name, "no-")) {
      option = Find(name);
      if (option != nullptr && !std::holds_alternative<Switch>(option->kind)) option = nullptr;
      value = "false";
    }
    if (option == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", argument.substr(0, equals), " is not an option; see --help"));
    }
    if (!value.has_value() && std::holds_alternative<Switch>(option->kind)) value = "true";
    if (!value.has_value()) {
      if (i + 1 == arguments.size()) return absl::InvalidArgumentError(absl::StrCat("--", name, " needs a value"));
      value = arguments[++i];
    }
    if (absl::Status status = std::visit(Assign{&options, name, *value}, option->kind); !status.ok()) return status;
  }
  if (absl::Status status = Complete(options); !status.ok()) return status;
  return options;
}

std::string OptionsHelp() {
  constexpr size_t kWidth = 100, kIndent = 6;
  std::string text =
      "stoker-replay: a mock engine that replays requests through stokerd and checks every row it is handed.\n\n"
      "Usage: stoker-replay [--option=value ...]\n";
  const Options defaults;
  for (const OptionGroup& group : Table()) {
    absl::StrAppend(&text, "\n", group.title, ":\n");
    for (const Option& option : group.options) {
      std::string head = absl::StrCat("  --", option.name);
      if (const auto* number = std::get_if<Number>(&option.kind)) {
        absl::StrAppend(&head, "=N  ", number->min, " to ", number->max, ", default ", defaults.*number->value);
      } else if (const auto* big = std::get_if<BigNumber>(&option.kind)) {
        absl::StrAppend(&head, "=N  default ", defaults.*big->value);
      } else if (const auto* real = std::get_if<Real>(&option.kind)) {
        absl::StrAppend(&head, "=X  0 to ", real->max, ", default ", defaults.*real->value);
      } else if (const auto* text_kind = std::get_if<Text>(&option.kind)) {
        const std::string& value = defaults.*text_kind->value;
        absl::StrAppend(&head, "=TEXT", value.empty() ? "" : absl::StrCat("  default ", value));
      } else if (const auto* choice = std::get_if<Choice>(&option.kind)) {
        const std::string& value = defaults.*choice->value;
        absl::StrAppend(&head, "=", absl::StrJoin(choice->choices, "|"),
                        value.empty() ? "" : absl::StrCat("  default ", value));
      }
      absl::StrAppend(&text, head, "\n");
      std::string line(kIndent, ' ');
      for (absl::string_view rest = option.help; !rest.empty();) {
        const size_t end = std::min(rest.find(' '), rest.size());
        if (line.size() + end + 1 > kWidth) {
          absl::StrAppend(&text, line, "\n");
          line.assign(kIndent, ' ');
        }
        absl::StrAppend(&line, line.size() > kIndent ? " " : "", rest.substr(0, end));
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
      absl::StrAppend(&text, line, "\n");
    }
  }
  absl::StrAppend(
      &text,
      "\nExit status: 0 all is well; 1 a row had wrong bytes; 2 bad option or input file; 3 the replay could\n"
      "not be finished (the daemon, a call, or an engine process failed); 130 interrupted.\n");
  return text;
}

}  // namespace stoker::replay
