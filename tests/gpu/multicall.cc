// One executable for the bundle's programs: what they share is in it once. Its name decides which
// of them it is: `ravelctl` is a link to it, or `ravel ravelctl ...`.

#include <array>
#include <cstdio>
#include <cstring>
#include <string_view>

// The programs' `main`, renamed where they are compiled for this one.
int RavelCoordinatorMain(int argc, char** argv);
int RavelWorkerMain(int argc, char** argv);
int RavelTrainerMain(int argc, char** argv);
int RavelctlMain(int argc, char** argv);

namespace {

struct Role {
  std::string_view name;
  int (*main)(int argc, char** argv);
};
constexpr std::array<Role, 4> kRoles = {{{"ravel-coordinator", RavelCoordinatorMain},
                                         {"ravel-worker", RavelWorkerMain},
                                         {"ravel-trainer", RavelTrainerMain},
                                         {"ravelctl", RavelctlMain}}};

const Role* FindRole(const char* path) {
  const char* const slash = std::strrchr(path, '/');
  const std::string_view name = slash == nullptr ? path : slash + 1;
  for (const Role& role : kRoles) {
    if (role.name == name) {
      return &role;
    }
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 0) {
    if (const Role* const role = FindRole(argv[0]); role != nullptr) {
      return role->main(argc, argv);
    }
  }
  if (argc > 1) {
    if (const Role* const role = FindRole(argv[1]); role != nullptr) {
      return role->main(argc - 1, argv + 1);
    }
  }
  std::fputs("usage: ravel ravel-coordinator|ravel-worker|ravel-trainer|ravelctl [ARGUMENTS]\n",
             stderr);
  return 2;
}
