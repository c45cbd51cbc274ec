#include "coordinator/ctl/completion.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

namespace ravel::ctl {
namespace {

constexpr char kJobNames[] = "$(timeout 0.3 ravelctl list -o name 2>/dev/null)";

// bash, and zsh through its bash emulation.
std::string BashScript(const std::vector<CompletionEntry>& entries) {
  std::string out =
      "_ravelctl() {\n"
      "  local current=\"${COMP_WORDS[COMP_CWORD]}\" verb=\"\" words=\"\" i\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    case \"${COMP_WORDS[i]}\" in\n"
      "      -*) ;;\n"
      "      *) verb=\"${verb:+$verb }${COMP_WORDS[i]}\" ;;\n"
      "    esac\n"
      "  done\n"
      "  case \"$verb\" in\n";
  for (const CompletionEntry& entry : entries) {
    const bool top = entry.verb.empty();
    absl::StrAppend(&out,
                    "    ",
                    top ? "\"\"" : absl::StrCat("\"", entry.verb, "\"|\"", entry.verb, " \"*"),
                    ") words=\"",
                    absl::StrJoin(entry.words, " "),
                    entry.takes_job ? absl::StrCat(" ", kJobNames) : "",
                    "\" ;;\n");
  }
  absl::StrAppend(&out,
                  "  esac\n"
                  "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
                  "  if [ ${#COMPREPLY[@]} -eq 0 ]; then\n"
                  "    COMPREPLY=($(compgen -f -- \"$current\"))\n"
                  "  fi\n"
                  "}\n"
                  "complete -F _ravelctl ravelctl\n");
  return out;
}

std::string FishScript(const std::vector<CompletionEntry>& entries) {
  std::string out = "complete -c ravelctl -f\n";
  for (const CompletionEntry& entry : entries) {
    const std::string condition = entry.verb.empty()
                                      ? "__fish_use_subcommand"
                                      : absl::StrCat("__fish_seen_subcommand_from ", entry.verb);
    absl::StrAppend(&out,
                    "complete -c ravelctl -n '",
                    condition,
                    "' -a '",
                    absl::StrJoin(entry.words, " "),
                    "'\n");
    if (entry.takes_job) {
      absl::StrAppend(&out,
                      "complete -c ravelctl -n '",
                      condition,
                      "' -a '(timeout 0.3 ravelctl list -o name 2>/dev/null)'\n");
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<std::string> CompletionScript(const std::string& shell,
                                             const std::vector<CompletionEntry>& entries) {
  std::vector<CompletionEntry> longest_first(entries.rbegin(), entries.rend());
  if (shell == "bash") {
    return BashScript(longest_first);
  }
  if (shell == "zsh") {
    return absl::StrCat("autoload -U +X bashcompinit && bashcompinit\n", BashScript(longest_first));
  }
  if (shell == "fish") {
    return FishScript(entries);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("completion: expected bash, zsh or fish, got '", shell, "'"));
}

}  // namespace ravel::ctl
