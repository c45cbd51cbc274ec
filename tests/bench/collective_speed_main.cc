// One rank of the collectives' benchmark (collective_rank.h).
//   collective_speed ours|gloo RANK RANKS FOLDER

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/bench/collective_rank.h"

int main(int argc, char** argv) {
  const std::string side = argc == 5 ? argv[1] : "";
  const int rank = argc == 5 ? std::atoi(argv[2]) : -1;
  const int ranks = argc == 5 ? std::atoi(argv[3]) : 0;
  if ((side != "ours" && side != "gloo") || rank < 0 || rank >= ranks || ranks > 64) {
    std::fprintf(stderr, "usage: collective_speed ours|gloo RANK RANKS FOLDER\n");
    return 2;
  }
  const auto collectives = side == "ours" ? ravel::bench::MakeOurs(rank, ranks)
                                          : ravel::bench::MakeGloo(rank, ranks, argv[4]);
  return ravel::bench::ServeRank(*collectives, rank, ranks);
}
