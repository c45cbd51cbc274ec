// Turns text files into token files. Inputs are mapped, cut into documents, and each document is
// encoded in blocks, at places where the tokenizer may be cut without changing its result (after a
// line end between letters). The validation part is cut off the end of each file. All files are
// written beside their final names; the index of the training text is renamed last, so a prefix
// that has an index is complete.

#include "coordinator/ctl/data_prepare.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <unistd.h>

#include "common/file_writer.h"
#include "common/token_file.h"
#include "common/utf8.h"
#include "coordinator/ctl/bpe_trainer.h"
#include "coordinator/ctl/mapped_text.h"
#include "coordinator/ctl/path_text.h"
#include "coordinator/ctl/tokenizer.h"

namespace ravel::ctl {
namespace {

constexpr int64_t kMaxTokenizerBytes = int64_t{256} << 20;
constexpr int64_t kLargestVocabulary = 1 << 20;
constexpr std::size_t kBlockBytes = std::size_t{1} << 18;

// The two parts of a file.
struct SplitText {
  std::string_view train;
  std::string_view validation;
};

SplitText SplitOff(std::string_view text, double fraction, const std::string& separator) {
  if (fraction <= 0) {
    return {text, {}};
  }
  const auto wanted = static_cast<std::size_t>(static_cast<double>(text.size()) * (1 - fraction));
  const std::string mark = separator.empty() ? "\n" : separator;
  const std::size_t found = text.find(mark, std::min(wanted, text.size()));
  const std::size_t cut = found == std::string_view::npos ? text.size() : found + mark.size();
  return {text.substr(0, cut), text.substr(cut)};
}

// Calls `document` for every document that is not empty.
absl::Status ForEachDocument(std::string_view text,
                             const std::string& separator,
                             const std::function<absl::Status(std::string_view)>& document) {
  while (!text.empty()) {
    const std::size_t end = separator.empty() ? std::string_view::npos : text.find(separator);
    const std::string_view one = text.substr(0, end);
    if (!one.empty()) {
      RETURN_IF_ERROR(document(one));
    }
    if (end == std::string_view::npos) {
      break;
    }
    text.remove_prefix(end + separator.size());
  }
  return absl::OkStatus();
}

// Returns the first position where a long document may be cut so that its parts tokenize as the
// whole does (Tokenizer::may_cut_lines): after a line end between two letters.
std::size_t SafeCut(std::string_view text, std::size_t from) {
  for (std::size_t i = std::max<std::size_t>(from, 2); i < text.size(); ++i) {
    const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    if (text[i - 1] == '\n' && letter(text[i]) && letter(text[i - 2])) {
      return i;
    }
  }
  return text.size();
}

class Preparer {
 public:
  Preparer(const PrepareRequest& request, const PrepareProgress& progress)
      : request_(request), progress_(progress) {}

  absl::StatusOr<PrepareResult> Run() {
    RETURN_IF_ERROR(CheckOutput());
    RETURN_IF_ERROR(CheckNoOldValidation());
    RETURN_IF_ERROR(OpenInputs());
    RETURN_IF_ERROR(MakeTokenizer());
    RETURN_IF_ERROR(FindEndOfDocument());
    RemoveLeftovers();
    result_.vocabulary = tokenizer_->vocabulary();
    ASSIGN_OR_RETURN(const std::unique_ptr<MegatronWriter> train,
                     MegatronWriter::Create(request_.output, result_.vocabulary));
    std::unique_ptr<MegatronWriter> validation;
    if (request_.validation_fraction > 0) {
      ASSIGN_OR_RETURN(validation,
                       MegatronWriter::Create(request_.output + ".validation", result_.vocabulary));
    }
    for (const SplitText& text : texts_) {
      RETURN_IF_ERROR(WriteDocuments(text.train, *train, result_.documents, result_.tokens));
      if (validation != nullptr) {
        RETURN_IF_ERROR(WriteDocuments(
            text.validation, *validation, result_.validation_documents, result_.validation_tokens));
      }
    }
    RETURN_IF_ERROR(CheckNotEmpty(validation != nullptr));
    ASSIGN_OR_RETURN(const std::unique_ptr<FileWriter> json,
                     FileWriter::Create(request_.output + ".tokenizer.json"));
    RETURN_IF_ERROR(json->Write(tokenizer_json_));
    RETURN_IF_ERROR(json->Sync());
    if (validation != nullptr) {
      RETURN_IF_ERROR(validation->Finish());
    }
    RETURN_IF_ERROR(json->Publish());
    RETURN_IF_ERROR(train->Finish());
    return std::move(result_);
  }

 private:
  // Files are named PREFIX.bin and so on: a folder would get hidden ones.
  absl::Status CheckOutput() const {
    RETURN_IF_ERROR(CheckIsPath("--output", request_.output));
    return request_.output.ends_with('/')
               ? absl::InvalidArgumentError(absl::StrCat("--output: \"",
                                                         request_.output,
                                                         "\": expected a prefix of files, such as ",
                                                         request_.output,
                                                         "tokens"))
               : absl::OkStatus();
  }
  absl::Status CheckGoesOn() const {
    return request_.cancelled && request_.cancelled()
               ? absl::CancelledError(
                     "interrupted; no file has changed, and the same command begins anew")
               : absl::OkStatus();
  }
  absl::Status OpenInputs() {
    for (const std::string& path : request_.inputs) {
      RETURN_IF_ERROR(CheckGoesOn());
      ASSIGN_OR_RETURN(MappedText text, MappedText::Open(path));
      RETURN_IF_ERROR(CheckUtf8(text));
      texts_.push_back(
          SplitOff(text.text(), request_.validation_fraction, request_.document_separator));
      result_.text_bytes += static_cast<int64_t>(text.text().size());
      files_.push_back(std::move(text));
    }
    if (result_.text_bytes == 0) {
      return absl::InvalidArgumentError("--input: expected text, got only empty files");
    }
    return absl::OkStatus();
  }

  absl::Status CheckUtf8(const MappedText& file) {
    std::string_view text = file.text();
    const std::size_t first = FindInvalidUtf8(text);
    if (first == std::string_view::npos) {
      return absl::OkStatus();
    }
    if (request_.require_utf8) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path(), ": expected UTF-8, but byte ", first, " is not"));
    }
    int64_t count = 0;
    for (std::size_t bad = first; bad != std::string_view::npos; bad = FindInvalidUtf8(text)) {
      ++count;
      text.remove_prefix(bad + 1);
    }
    result_.warnings.push_back(absl::StrCat(file.path(),
                                            ": ",
                                            count,
                                            count == 1 ? " byte is" : " bytes are",
                                            " not UTF-8 (the first at ",
                                            first,
                                            "); kept as bytes"));
    return absl::OkStatus();
  }

  absl::Status MakeTokenizer() {
    const std::string& choice = request_.tokenizer;
    if (choice == "bytes") {
      tokenizer_json_ = BytesTokenizerJson();
    } else if (absl::StartsWith(choice, "hf:")) {
      const std::string path = choice.substr(3);
      ASSIGN_OR_RETURN(tokenizer_json_, ReadWholeFile(path, kMaxTokenizerBytes));
      absl::StatusOr<std::unique_ptr<Tokenizer>> loaded = Tokenizer::FromJson(tokenizer_json_);
      RETURN_IF_ERROR(Annotate(loaded.status(), path));
      tokenizer_ = *std::move(loaded);
      return absl::OkStatus();
    } else if (absl::StartsWith(choice, "train-bpe:")) {
      RETURN_IF_ERROR(TrainTokenizer(choice.substr(10)));
    } else {
      return absl::InvalidArgumentError(absl::StrCat(
          "--tokenizer: expected bytes, hf:FILE or train-bpe:VOCAB, got '", choice, "'"));
    }
    ASSIGN_OR_RETURN(tokenizer_, Tokenizer::FromJson(tokenizer_json_));
    return absl::OkStatus();
  }

  absl::Status TrainTokenizer(const std::string& size) {
    int64_t vocabulary = 0;
    const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), vocabulary);
    if (error != std::errc() || end != size.data() + size.size() || vocabulary < 257 ||
        vocabulary > kLargestVocabulary) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tokenizer: train-bpe: expected a vocabulary from 257 to ",
                       kLargestVocabulary,
                       ", got '",
                       size,
                       "'"));
    }
    BpeTrainer trainer(vocabulary);
    int64_t done = 0;
    for (const SplitText& text : texts_) {  // never the validation text
      std::string_view rest = text.train;
      while (!rest.empty()) {
        const std::size_t cut = SafeCut(rest, std::min(rest.size(), kBlockBytes));
        RETURN_IF_ERROR(trainer.AddText(rest.substr(0, cut)));
        rest.remove_prefix(cut);
        done += static_cast<int64_t>(cut);
        progress_("counting words", done, result_.text_bytes);
        RETURN_IF_ERROR(CheckGoesOn());
      }
    }
    progress_("training", done, result_.text_bytes);
    tokenizer_json_ = trainer.Train();
    return absl::OkStatus();
  }

  absl::Status FindEndOfDocument() {
    if (request_.end_of_document == "none") {
      return absl::OkStatus();
    }
    if (request_.end_of_document.empty()) {
      end_of_document_ = tokenizer_->end_of_document();
      if (end_of_document_ < 0) {
        result_.warnings.push_back(
            "the tokenizer has no end-of-document token; documents follow each other without one");
      }
      return absl::OkStatus();
    }
    end_of_document_ = tokenizer_->FindToken(request_.end_of_document);
    if (end_of_document_ < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--end-of-document: expected a token of the tokenizer, got '",
                       request_.end_of_document,
                       "'"));
    }
    return absl::OkStatus();
  }

  absl::Status WriteDocuments(std::string_view text,
                              MegatronWriter& writer,
                              int64_t& documents,
                              int64_t& tokens) {
    const auto write = [&](std::string_view document) -> absl::Status {
      std::vector<int32_t> ids;
      RETURN_IF_ERROR(EncodeDocument(document, ids));
      if (end_of_document_ >= 0) {
        ids.push_back(end_of_document_);
      }
      ++documents;
      tokens += static_cast<int64_t>(ids.size());
      return writer.AddDocument(ids);
    };
    return ForEachDocument(text, request_.document_separator, write);
  }

  absl::Status EncodeDocument(std::string_view document, std::vector<int32_t>& ids) {
    while (!document.empty()) {
      const std::size_t cut = tokenizer_->may_cut_lines()
                                  ? SafeCut(document, std::min(document.size(), kBlockBytes))
                                  : document.size();
      RETURN_IF_ERROR(tokenizer_->Encode(document.substr(0, cut), ids));
      document.remove_prefix(cut);
      done_ += static_cast<int64_t>(cut);
      progress_("tokenizing", done_, result_.text_bytes);
      RETURN_IF_ERROR(CheckGoesOn());
    }
    return absl::OkStatus();
  }

  // A job would take them for this text's, and they may be part of it.
  absl::Status CheckNoOldValidation() const {
    for (const char* end : {".validation.bin", ".validation.idx"}) {
      const std::string path = request_.output + end;
      if (request_.validation_fraction <= 0 && access(path.c_str(), F_OK) == 0) {
        return absl::AlreadyExistsError(absl::StrCat(
            path,
            ": is there already, and jobs and `data push` would take it as this text's; "
            "move it, or give --validation-fraction"));
      }
    }
    return absl::OkStatus();
  }

  // Of runs that were killed.
  void RemoveLeftovers() const {
    for (const char* end :
         {".bin", ".idx", ".validation.bin", ".validation.idx", ".tokenizer.json"}) {
      RemoveUnfinished(request_.output + end);
    }
  }

  absl::Status CheckNotEmpty(bool with_validation) const {
    if (result_.tokens == 0) {
      return absl::InvalidArgumentError("--input: expected text, found no document in it");
    }
    if (with_validation && result_.validation_tokens == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--validation-fraction: expected a larger part, got ",
                       request_.validation_fraction,
                       ", which leaves no text for validation"));
    }
    return absl::OkStatus();
  }

  const PrepareRequest& request_;
  const PrepareProgress& progress_;
  PrepareResult result_;
  std::vector<MappedText> files_;
  std::vector<SplitText> texts_;
  std::string tokenizer_json_;
  std::unique_ptr<Tokenizer> tokenizer_;
  int32_t end_of_document_ = -1;
  int64_t done_ = 0;
};

}  // namespace

absl::StatusOr<PrepareResult> PrepareData(const PrepareRequest& request,
                                          const PrepareProgress& progress) {
  if (request.inputs.empty()) {
    return absl::InvalidArgumentError("--input: expected at least one file");
  }
  if (!(request.validation_fraction >= 0 && request.validation_fraction <= 0.5)) {
    return absl::InvalidArgumentError(absl::StrCat("--validation-fraction: expected 0 to 0.5, got ",
                                                   request.validation_fraction));
  }
  return Preparer(request, progress).Run();
}

}  // namespace ravel::ctl
