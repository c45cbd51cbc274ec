// Verbs about text and token ids: prepare data, push it, show a batch, generate. They need no
// coordinator.
// Progress goes to stderr and only on a terminal, so stdout remains parseable.

#include "coordinator/ctl/data_verbs.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/time_text.h"
#include "coordinator/ctl/checkpoints.h"
#include "coordinator/ctl/data_batch.h"
#include "coordinator/ctl/data_prepare.h"
#include "coordinator/ctl/data_push.h"
#include "coordinator/ctl/exit_code.h"
#include "coordinator/ctl/generate.h"
#include "coordinator/ctl/interrupt.h"
#include "coordinator/ctl/job_verbs.h"
#include "coordinator/ctl/tokenizer.h"
#include "coordinator/saves/checkpoint_pins.h"

namespace ravel::ctl {
namespace {

constexpr int64_t kMaxTokenizerBytes = int64_t{256} << 20;

// "\n", "\t" and "\\" as written on a command line.
std::string Unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i];
      continue;
    }
    const char next = text[++i];
    out += next == 'n' ? '\n' : next == 't' ? '\t' : next;
  }
  return out;
}

// A line on stderr that follows the work, on a terminal only.
class PrepareBar {
 public:
  void Show(const char* phase, int64_t done, int64_t all) {
    const int64_t now_ms = SystemClock::Get().MonotonicMs();
    if (!on_terminal_ || (drawn_ && now_ms - drawn_ms_ < 100)) {
      return;
    }
    drawn_ = true;
    drawn_ms_ = now_ms;
    const double seconds = static_cast<double>(now_ms - start_ms_ + 1) / 1000;
    const std::string line = absl::StrFormat("%s %s of %s %d%% %.1f MB/s",
                                             phase,
                                             FormatBytes(done),
                                             FormatBytes(all),
                                             all > 0 ? done * 100 / all : 100,
                                             static_cast<double>(done) / 1e6 / seconds);
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
    std::fflush(stderr);
  }
  void Finish() const {
    if (drawn_) {
      std::fputs("\r\033[K", stderr);
    }
  }

 private:
  const bool on_terminal_ = isatty(STDERR_FILENO) == 1;
  const int64_t start_ms_ = SystemClock::Get().MonotonicMs();
  int64_t drawn_ms_ = 0;
  bool drawn_ = false;
};

json::Value PrepareDocument(const PrepareOptions& options, const PrepareResult& result) {
  json::Value document;
  document.Set("schemaVersion", "ravel/v1");
  document.Set("prefix", options.output);
  document.Set("tokenizer", options.output + ".tokenizer.json");
  document.Set("vocabulary", result.vocabulary);
  document.Set("textBytes", result.text_bytes);
  document.Set("documents", result.documents);
  document.Set("tokens", result.tokens);
  document.Set("validationDocuments", result.validation_documents);
  document.Set("validationTokens", result.validation_tokens);
  return document;
}

// The paths by which a job names what was pushed: field of the job file, path.
std::vector<std::pair<std::string, std::string>> JobPathsOf(const DataPushResult& result) {
  if (result.manifest.kind == store::DataSetKind::kModel) {
    return {{"model.from", result.url}};
  }
  std::vector<std::pair<std::string, std::string>> paths;
  for (const store::DataTokens& tokens : result.manifest.tokens) {
    paths.emplace_back(paths.empty() ? "data.train" : "data.validation",
                       store::JoinPath(result.url, tokens.prefix));
  }
  return paths;
}

json::Value PushDocument(const DataPushResult& result) {
  json::Value document;
  document.Set("schemaVersion", "ravel/v1");
  document.Set("url", result.url);
  document.Set("digest", result.digest);
  document.Set("bytes", result.manifest.total_bytes());
  document.Set("copiedFiles", result.copied_files);
  document.Set("copiedBytes", result.copied_bytes);
  json::Value jobs;
  for (const auto& [field, path] : JobPathsOf(result)) {
    jobs.Set(field, path);
  }
  document.Set("spec", std::move(jobs));
  json::Array files;
  for (const store::DataFile& file : result.manifest.files) {
    json::Value& row = files.emplace_back();
    row.Set("name", file.name).Set("bytes", file.bytes).Set("sha256", file.sha256);
  }
  document.Set("files", json::Value(std::move(files)));
  return document;
}

// True for data that only nodes have, which they fetch.
bool NamesDataSets(const plan::JobSpec& spec) {
  const auto remote = [](const plan::DataSource& source) { return store::IsDataUrl(source.path); };
  return std::any_of(spec.data.train.begin(), spec.data.train.end(), remote);
}

}  // namespace

int RunDataPush(const CommonOptions& common, const PushOptions& options) {
  PrepareBar bar;
  const absl::StatusOr<DataPushResult> result = PushData(
      {.source = options.source,
       .to = options.to,
       .kind = options.model ? store::DataSetKind::kModel : store::DataSetKind::kTokens},
      [&bar](const char* phase, int64_t done, int64_t all) { bar.Show(phase, done, all); });
  bar.Finish();
  if (!result.ok()) {
    return Report(result.status());
  }
  if (common.format != Format::kTable) {
    Print(FormatDocument(PushDocument(*result), common.format));
    return kExitOk;
  }
  const std::string copied =
      result->was_there
          ? "is there already"
          : absl::StrCat(result->copied_files, " copied now, ", FormatBytes(result->copied_bytes));
  Print(absl::StrCat(result->url,
                     ": ",
                     result->manifest.files.size(),
                     " files, ",
                     FormatBytes(result->manifest.total_bytes()),
                     " (",
                     copied,
                     ")\n"));
  for (const auto& [field, path] : JobPathsOf(*result)) {
    Print(absl::StrCat("  ", field, ": ", path, "\n"));
  }
  return kExitOk;
}

int RunDataPrepare(const CommonOptions& common, const PrepareOptions& options) {
  PrepareRequest request;
  request.inputs = options.inputs;
  request.tokenizer = options.tokenizer;
  request.output = options.output;
  request.validation_fraction = options.validation_fraction;
  request.document_separator = Unescape(options.document_separator);
  request.end_of_document = options.end_of_document;
  request.require_utf8 = options.require_utf8;
  request.cancelled = [] { return Interrupt::Get().requested(); };
  Interrupt::Get();  // from here on a signal is noticed between pieces, and told
  PrepareBar bar;
  const int64_t start_ms = SystemClock::Get().MonotonicMs();
  const absl::StatusOr<PrepareResult> result = PrepareData(
      request,
      [&bar](const char* phase, int64_t done, int64_t all) { bar.Show(phase, done, all); });
  bar.Finish();
  if (!result.ok()) {
    return ReportEnd(result.status());
  }
  for (const std::string& warning : result->warnings) {
    Say(absl::StrCat("ravelctl: warning: ", warning));
  }
  const double seconds =
      static_cast<double>(SystemClock::Get().MonotonicMs() - start_ms + 1) / 1000;
  if (common.format != Format::kTable) {
    Print(FormatDocument(PrepareDocument(options, *result), common.format));
    return kExitOk;
  }
  Print(absl::StrFormat(
      "%s: %d tokens in %d documents (%.2f bytes per token), vocabulary %d; %.1f MB/s\n",
      options.output,
      result->tokens,
      result->documents,
      static_cast<double>(result->text_bytes) /
          static_cast<double>(std::max<int64_t>(1, result->tokens + result->validation_tokens)),
      result->vocabulary,
      static_cast<double>(result->text_bytes) / 1e6 / seconds));
  if (result->validation_documents > 0) {
    Print(absl::StrFormat("%s.validation: %d tokens in %d documents\n",
                          options.output,
                          result->validation_tokens,
                          result->validation_documents));
  }
  return kExitOk;
}

int RunDataBatch(const CommonOptions& common, const BatchOptions& options) {
  const absl::StatusOr<CanonicalJob> job = LoadJobFile(options.file, PathScope::kAll);
  if (!job.ok()) {
    return Report(job.status());
  }
  if (NamesDataSets(job->spec)) {
    return ReportUsage("spec.data.train: data batch reads files of this host, not of a store");
  }
  const absl::StatusOr<json::Value> document = BatchDocument(job->spec, options.step);
  if (!document.ok()) {
    return Report(document.status());
  }
  if (common.format != Format::kTable) {
    Print(FormatDocument(*document, common.format));
    return kExitOk;
  }
  Table table({"LANE", "SAMPLE", "FIRST TOKENS"});
  for (const json::Value& lane : document->Find("lanes")->AsArray()) {
    for (const json::Value& sample : lane.Find("samples")->AsArray()) {
      std::string tokens;
      for (std::size_t i = 0; i < std::min<std::size_t>(8, sample.Find("tokens")->AsArray().size());
           ++i) {
        absl::StrAppend(&tokens, i > 0 ? " " : "", sample.Find("tokens")->AsArray()[i].AsInt());
      }
      table.AddRow({absl::StrCat(lane.Find("lane")->AsInt()),
                    absl::StrCat(sample.Find("index")->AsInt()),
                    tokens});
    }
  }
  Print(table.Text(!common.no_headers));
  return kExitOk;
}

json::Value GeneratedDocument(const std::string& prompt,
                              const std::string& text,
                              const GeneratedText& generated) {
  json::Value document;
  document.Set("schemaVersion", "ravel/v1");
  document.Set("prompt", prompt);
  document.Set("text", text);
  document.Set("tokens", json::Array(generated.tokens.begin(), generated.tokens.end()));
  document.Set("endedBy", generated.ended_by);
  document.Set("positions", generated.positions);
  return document;
}

// The tokenizer of a file, or else of the step.
absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFor(const StepLocation& step,
                                                        const std::string& file) {
  if (!file.empty()) {
    return access(file.c_str(), R_OK) == 0
               ? Tokenizer::FromFile(file)
               : absl::NotFoundError(absl::StrCat("--tokenizer: ", file, ": cannot be read"));
  }
  const absl::StatusOr<std::string> text = store::ReadFile(
      *step.store, store::JoinPath(step.directory, "hf/tokenizer.json"), kMaxTokenizerBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(
        absl::StrCat(step.store->Locate(step.directory),
                     ": expected a checkpoint with hf/tokenizer.json; else give --tokenizer FILE"));
  }
  RETURN_IF_ERROR(text.status());
  return Tokenizer::FromJson(*text);
}

// The first option of `generate` that is out of range; empty: none is.
std::string RefusalOf(const GenerateOptions& options) {
  if (options.max_new_tokens < 1) {
    return absl::StrCat("--max-new-tokens: expected 1 or more, got ", options.max_new_tokens);
  }
  if (!std::isfinite(options.temperature) || options.temperature < 0) {
    return absl::StrCat("--temperature: expected a finite number, 0 or more, got ",
                        options.temperature);
  }
  if (options.top_k < 0) {
    return absl::StrCat("--top-k: expected 0 or more, got ", options.top_k);
  }
  return options.seed < 0
             ? absl::StrCat("--seed: expected 0 to 9223372036854775807, got ", options.seed)
             : "";
}

int RunGenerate(const CommonOptions& common, const GenerateOptions& options) {
  if (const std::string wrong = RefusalOf(options); !wrong.empty()) {
    return ReportUsage(wrong);
  }
  const absl::StatusOr<StepLocation> step = LocateStep(options.checkpoint);
  if (!step.ok()) {
    return Report(Annotate(step.status(), "--checkpoint"));
  }
  const coordinator::ReaderPin pin(step->store.get(), step->directory);
  const std::string checkpoint = step->store->Locate(step->directory);
  const absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
      TokenizerFor(*step, options.tokenizer);
  if (!tokenizer.ok()) {
    return Report(tokenizer.status());
  }
  GenerateRequest request;
  request.checkpoint = checkpoint;
  request.max_new_tokens = options.max_new_tokens;
  request.temperature = options.temperature;
  request.top_k = options.top_k;
  request.seed = static_cast<uint64_t>(options.seed);
  request.stop_token = (*tokenizer)->end_of_document();
  const absl::Status encoded = (*tokenizer)->Encode(options.prompt, request.tokens);
  if (!encoded.ok()) {
    return Report(encoded);
  }
  if (request.tokens.empty()) {
    if (request.stop_token < 0) {
      return ReportUsage("--prompt: expected text, got nothing");
    }
    request.tokens.push_back(request.stop_token);  // what a new document begins after
  }
  const absl::StatusOr<std::string> trainer = SiblingBinary("ravel-trainer");
  if (!trainer.ok()) {
    return Report(trainer.status());
  }
  const absl::StatusOr<GeneratedText> generated = GenerateTokens(*trainer, request);
  if (!generated.ok()) {
    return Report(generated.status());
  }
  const absl::StatusOr<std::string> text = (*tokenizer)->Decode(generated->tokens);
  if (!text.ok()) {
    return Report(text.status());
  }
  if (common.format == Format::kTable) {
    Print(options.prompt + *text + "\n");
  } else {
    Print(FormatDocument(GeneratedDocument(options.prompt, *text, *generated), common.format));
  }
  if (const std::string early = EarlyEndText(request, *generated); !early.empty()) {
    Say("ravelctl: " + early);
  }
  return kExitOk;
}

}  // namespace ravel::ctl
