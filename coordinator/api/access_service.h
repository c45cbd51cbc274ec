#pragma once

// proto/access.proto: checks requests and asks the registry. No decisions here.

#include "coordinator/access/access_registry.h"
#include "proto/access.grpc.pb.h"

namespace ravel::coordinator {

// Thread-safe. Changes wait for the disk on the calling thread: they are few, and of
// administrators.
class AccessService : public v1::Access::CallbackService {
 public:
  // Null: plaintext; every call is FailedPrecondition.
  explicit AccessService(AccessRegistry* registry) : registry_(registry) {}

  using Unary = grpc::ServerUnaryReactor;
  using Context = grpc::CallbackServerContext;

  Unary* Enrol(Context* context,
               const v1::EnrolRequest* request,
               v1::EnrolResponse* response) override;
  Unary* Renew(Context* context,
               const v1::RenewRequest* request,
               v1::EnrolResponse* response) override;
  Unary* CertifyTrainer(Context* context,
                        const v1::CertifyTrainerRequest* request,
                        v1::EnrolResponse* response) override;
  Unary* WhoAmI(Context* context,
                const v1::WhoAmIRequest* request,
                v1::WhoAmIResponse* response) override;
  Unary* CreateToken(Context* context,
                     const v1::CreateTokenRequest* request,
                     v1::CreateTokenResponse* response) override;
  Unary* Revoke(Context* context,
                const v1::RevokeRequest* request,
                v1::RevokeResponse* response) override;
  Unary* ListIdentities(Context* context,
                        const v1::ListIdentitiesRequest* request,
                        v1::ListIdentitiesResponse* response) override;
  Unary* ListAudit(Context* context,
                   const v1::ListAuditRequest* request,
                   v1::ListAuditResponse* response) override;
  Unary* GetTrust(Context* context,
                  const v1::GetTrustRequest* request,
                  v1::GetTrustResponse* response) override;

 private:
  AccessRegistry* const registry_;
};

}  // namespace ravel::coordinator
