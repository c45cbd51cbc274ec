#include "coordinator/access/identity.h"

#include <set>

#include <gtest/gtest.h>

#include "proto/access.pb.h"
#include "proto/fleet.pb.h"
#include "proto/jobs.pb.h"

namespace ravel::coordinator {
namespace {

Identity User(Role role, const std::string& space = "") {
  return {.kind = IdentityKind::kUser, .name = "alice", .role = role, .namespace_name = space};
}
Identity Node() {
  return {.kind = IdentityKind::kNode, .name = "n1", .role = Role::kNode};
}

std::set<std::string> AllMethods() {
  std::set<std::string> methods;
  for (const auto* file : {v1::SubmitJobRequest::descriptor()->file(),
                           v1::Hello::descriptor()->file(),
                           v1::EnrolRequest::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        methods.insert("/" + file->service(i)->full_name() + "/" +
                       file->service(i)->method(j)->name());
      }
    }
  }
  return methods;
}

TEST(IdentityTest, EveryMethodHasAnOwner) {
  const std::set<std::string> methods = AllMethods();
  ASSERT_GT(methods.size(), 25u);
  for (const std::string& method : methods) {
    const bool somebody = IsOpenMethod(method) || CheckMethod(User(Role::kAdmin), method).ok() ||
                          CheckMethod(Node(), method).ok();
    EXPECT_TRUE(somebody) << method << " is in no row of the table: nobody may call it";
  }
}

TEST(IdentityTest, UnknownMethodsAreDeniedToAll) {
  for (const char* method : {"", "/", "/ravel.v1.Jobs/GetJobs", "/grpc.health.v1.Health/Check"}) {
    EXPECT_TRUE(absl::IsPermissionDenied(CheckMethod(User(Role::kAdmin), method))) << method;
    EXPECT_TRUE(absl::IsPermissionDenied(CheckMethod(Node(), method))) << method;
  }
}

TEST(IdentityTest, ViewersChangeNothing) {
  for (const std::string& method : AllMethods()) {
    if (IsChange(method) && !IsOpenMethod(method) && method != "/ravel.v1.Access/Renew") {
      EXPECT_FALSE(CheckMethod(User(Role::kViewer), method).ok()) << method;
    }
  }
  EXPECT_TRUE(CheckMethod(User(Role::kViewer), "/ravel.v1.Jobs/GetJob").ok());
}

TEST(IdentityTest, EachRoleMayDoWhatThoseBelowMay) {
  for (const std::string& method : AllMethods()) {
    bool before = false;
    for (const Role role : {Role::kViewer, Role::kUser, Role::kOperator, Role::kAdmin}) {
      const bool now = CheckMethod(User(role), method).ok();
      EXPECT_TRUE(now || !before) << method << " is lost by " << NameOf(role);
      before = now;
    }
  }
  EXPECT_FALSE(CheckMethod(User(Role::kUser), "/ravel.v1.Jobs/HoldNode").ok());
  EXPECT_FALSE(CheckMethod(User(Role::kOperator), "/ravel.v1.Access/CreateToken").ok());
}

TEST(IdentityTest, NodesAndUsersDoNotTakeEachOthersPart) {
  EXPECT_TRUE(CheckMethod(Node(), "/ravel.v1.Fleet/Connect").ok());
  EXPECT_FALSE(CheckMethod(User(Role::kAdmin), "/ravel.v1.Fleet/Connect").ok());
  EXPECT_FALSE(CheckMethod(Node(), "/ravel.v1.Jobs/GetJob").ok());
  EXPECT_FALSE(CheckMethod(Node(), "/ravel.v1.Jobs/SubmitJob").ok());
  EXPECT_FALSE(CheckMethod(Node(), "/ravel.v1.Access/CreateToken").ok());
}

TEST(IdentityTest, AStoreAsksForWhomToTrustAndForNothingElse) {
  const Identity store = {.kind = IdentityKind::kStore};
  EXPECT_EQ(store.Text(), "store");
  for (const std::string& method : AllMethods()) {
    EXPECT_EQ(CheckMethod(store, method).ok(), method == "/ravel.v1.Access/GetTrust") << method;
  }
  EXPECT_FALSE(CheckMethod(Node(), "/ravel.v1.Access/GetTrust").ok());
  EXPECT_FALSE(CheckMethod(User(Role::kOperator), "/ravel.v1.Access/GetTrust").ok());
  EXPECT_FALSE(CheckNamespace(store, "default").ok());
}

TEST(IdentityTest, ATrainerCallsNoMethodOfACoordinator) {
  const Identity trainer = {.kind = IdentityKind::kTrainer, .name = TrainerName("n1", "4f-9")};
  EXPECT_EQ(trainer.Text(), "trainer/n1/4f-9");
  EXPECT_EQ(NodeOfTrainer(trainer.name), "n1");
  for (const std::string& method : AllMethods()) {
    EXPECT_TRUE(absl::IsPermissionDenied(CheckMethod(trainer, method))) << method;
  }
  EXPECT_TRUE(absl::IsPermissionDenied(CheckMethod(trainer, "/grpc.health.v1.Health/Watch")));
  EXPECT_FALSE(CheckNamespace(trainer, "default").ok());
  EXPECT_FALSE(CheckMethod(User(Role::kAdmin), "/ravel.v1.Access/CertifyTrainer").ok());
}

TEST(IdentityTest, ANamespaceIsTheUsersOwn) {
  EXPECT_TRUE(CheckNamespace(User(Role::kUser, "default"), "").ok());
  EXPECT_TRUE(CheckNamespace(User(Role::kUser, "team"), "team").ok());
  EXPECT_TRUE(absl::IsPermissionDenied(CheckNamespace(User(Role::kUser, "team"), "")));
  EXPECT_TRUE(absl::IsPermissionDenied(CheckNamespace(User(Role::kUser, "team"), "teams")));
  EXPECT_TRUE(CheckNamespace(User(Role::kOperator), "team").ok());
  EXPECT_FALSE(CheckNamespace(User(Role::kViewer), "default").ok());
  EXPECT_FALSE(CheckNamespace(Node(), "default").ok());
}

TEST(IdentityTest, UrisAreReadBackAndNothingElseIs) {
  IdentityKind kind = IdentityKind::kUser;
  std::string name;
  ASSERT_TRUE(ParseUri("c1", UriOf("c1", IdentityKind::kNode, "n-1.x"), &kind, &name));
  EXPECT_EQ(kind, IdentityKind::kNode);
  EXPECT_EQ(name, "n-1.x");
  ASSERT_TRUE(ParseUri("c1", StoreUri("c1"), &kind, &name));
  EXPECT_EQ(kind, IdentityKind::kStore);
  EXPECT_EQ(name, "");
  ASSERT_TRUE(
      ParseUri("c1", UriOf("c1", IdentityKind::kTrainer, TrainerName("n1", "4f-9")), &kind, &name));
  EXPECT_EQ(kind, IdentityKind::kTrainer);
  EXPECT_EQ(name, "n1/4f-9");
  for (const char* bad : {"",
                          "spiffe://c1.ravel/node/",
                          "spiffe://c2.ravel/node/n1",
                          "spiffe://c1.ravel/coordinator",
                          "spiffe://c1.ravel/store/s1",
                          "spiffe://c2.ravel/store",
                          "spiffe://c1.ravel/node/../user/admin",
                          "spiffe://c1.ravel/node/a/b",
                          "spiffe://c1.ravel/trainer/n1",
                          "spiffe://c1.ravel/trainer/n1/",
                          "spiffe://c1.ravel/trainer//4f",
                          "spiffe://c1.ravel/trainer/n1/4f/9",
                          "spiffe://c1.ravel/trainer/../4f",
                          "spiffe://c1.ravel/user/a b",
                          "https://c1.ravel/user/admin"}) {
    EXPECT_FALSE(ParseUri("c1", bad, &kind, &name)) << bad;
  }
}

}  // namespace
}  // namespace ravel::coordinator
