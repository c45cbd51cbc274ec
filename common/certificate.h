#pragma once

// Keys, requests and certificates of a cluster, over OpenSSL: ECDSA on P-256, X.509 v3, PEM text.
// Every certificate but the authority's names its owner by one URI (SPIFFE). Whatever does not
// parse is InvalidArgument. Thread-safe.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel {

// A certificate as its readers need it.
struct CertificateFacts {
  std::string uri;                 // the one URI name; empty: none
  std::string serial;              // hex, two digits a byte
  std::string fingerprint;         // SHA-256 of its DER form, hex
  std::vector<std::string> names;  // DNS names and addresses, as text
  int64_t not_before_ms = 0;
  int64_t not_after_ms = 0;
  bool is_client = false;  // may be shown to a server
};

enum class CertificateUse { kClient, kServer, kServerAndClient };

struct CertificateOrder {
  std::string uri;
  std::string serial;                   // at most 20 bytes, the first below 0x80; not hex
  std::vector<std::string> names = {};  // of a server: host names, IPv4 and IPv6 addresses
  CertificateUse use = CertificateUse::kClient;
  int64_t not_before_ms = 0;
  int64_t not_after_ms = 0;
};

// A certificate authority: what signs, and what it signs with.
struct Authority {
  std::string certificate;
  std::string key;
};

// A fresh private key, PKCS #8 without a password.
std::string MakePrivateKey();
// A request for a certificate of this key; it names nobody, because the answer does.
absl::StatusOr<std::string> MakeCertificateRequest(const std::string& key);

// Signs itself; may sign only certificates of users and servers (path length 0).
absl::StatusOr<Authority> MakeAuthority(const std::string& common_name,
                                        int64_t not_before_ms,
                                        int64_t not_after_ms);

// A certificate for the key of `request`, whose signature must be its own; nothing else of the
// request is used. Only keys on P-256 are accepted.
absl::StatusOr<std::string> IssueCertificate(const Authority& authority,
                                             const std::string& request,
                                             const CertificateOrder& order);

// The first certificate of the text.
absl::StatusOr<CertificateFacts> ReadCertificate(const std::string& pem);
// All certificates of the text, each alone.
std::vector<std::string> SplitCertificates(const std::string& pem);
// InvalidArgument unless the certificate may sign others, is signed by itself and in force, and the
// key is its own: clients trust no chain that ends before such a certificate.
absl::Status CheckAuthority(const Authority& authority, int64_t now_ms);
// InvalidArgument unless the key is that of the certificate.
absl::Status CheckKeyPair(const std::string& certificate, const std::string& key);

}  // namespace ravel
