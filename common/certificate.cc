// OpenSSL's objects stop here: each is freed by its Owned pointer, each failure becomes a status.
// Times are whole seconds, as certificates have them.

#include "common/certificate.h"

#include <algorithm>
#include <memory>

#include <absl/strings/str_cat.h>
#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include "common/check.h"
#include "common/crypto.h"

namespace ravel {
namespace {

constexpr size_t kMaxPemBytes = 64 << 10;
constexpr int64_t kMsPerSecond = 1000;

template <auto free>
struct Freeing {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};
using OwnedBio = std::unique_ptr<BIO, Freeing<BIO_free_all>>;
using OwnedKey = std::unique_ptr<EVP_PKEY, Freeing<EVP_PKEY_free>>;
using OwnedCertificate = std::unique_ptr<X509, Freeing<X509_free>>;
using OwnedRequest = std::unique_ptr<X509_REQ, Freeing<X509_REQ_free>>;
using OwnedExtension = std::unique_ptr<X509_EXTENSION, Freeing<X509_EXTENSION_free>>;
using OwnedNames = std::unique_ptr<GENERAL_NAMES, Freeing<GENERAL_NAMES_free>>;
using OwnedNumber = std::unique_ptr<BIGNUM, Freeing<BN_free>>;

// Takes what OpenSSL remarked, so that the next caller does not find it.
absl::Status Refused(const std::string& what) {
  const unsigned long code = ERR_peek_last_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return absl::InvalidArgumentError(
      absl::StrCat(what, reason == nullptr ? "" : ": ", reason == nullptr ? "" : reason));
}

OwnedBio Reading(const std::string& text) {
  return OwnedBio(
      BIO_new_mem_buf(text.data(), static_cast<int>(std::min(text.size(), kMaxPemBytes))));
}

std::string TextOf(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return std::string(data, static_cast<size_t>(std::max(size, 0L)));
}

// A key that is protected by a password is refused rather than asked for on the terminal.
int NoPassword(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*user*/) {
  return -1;
}

absl::StatusOr<OwnedKey> ParseKey(const std::string& pem) {
  const OwnedBio bio = Reading(pem);
  OwnedKey key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) {
    return Refused("expected a private key in PEM form");
  }
  return key;
}

absl::StatusOr<OwnedCertificate> ParseCertificate(const std::string& pem) {
  const OwnedBio bio = Reading(pem);
  OwnedCertificate certificate(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr));
  if (certificate == nullptr) {
    return Refused("expected a certificate in PEM form");
  }
  return certificate;
}

std::string PemOf(X509* certificate) {
  const OwnedBio bio(BIO_new(BIO_s_mem()));
  CHECK_EQ(PEM_write_bio_X509(bio.get(), certificate), 1);
  return TextOf(bio.get());
}

absl::Status Extend(X509* certificate, X509* issuer, int extension, const std::string& value) {
  X509V3_CTX context = {};
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  const OwnedExtension made(X509V3_EXT_conf_nid(nullptr, &context, extension, value.c_str()));
  if (made == nullptr || X509_add_ext(certificate, made.get(), -1) != 1) {
    return Refused(absl::StrCat("extension ", OBJ_nid2sn(extension)));
  }
  return absl::OkStatus();
}

bool IsAddress(const std::string& name) {
  in6_addr buffer = {};
  return inet_pton(AF_INET, name.c_str(), &buffer) == 1 ||
         inet_pton(AF_INET6, name.c_str(), &buffer) == 1;
}

// Added as typed values, never through OpenSSL's configuration language: a name from outside with a
// comma would be another name there.
absl::Status AddNames(X509* certificate, const CertificateOrder& order) {
  const OwnedNames names(GENERAL_NAMES_new());
  const auto add = [&](int type, int length, const void* data) {
    GENERAL_NAME* name = GENERAL_NAME_new();
    ASN1_STRING* text = type == GEN_IPADD ? ASN1_OCTET_STRING_new() : ASN1_IA5STRING_new();
    CHECK(name != nullptr && text != nullptr && ASN1_STRING_set(text, data, length) == 1);
    GENERAL_NAME_set0_value(name, type, text);
    CHECK(sk_GENERAL_NAME_push(names.get(), name) > 0);
  };
  add(GEN_URI, static_cast<int>(order.uri.size()), order.uri.data());
  for (const std::string& name : order.names) {
    if (IsAddress(name)) {
      in6_addr bytes = {};
      const bool six = inet_pton(AF_INET, name.c_str(), &bytes) != 1;
      if (six) {
        CHECK_EQ(inet_pton(AF_INET6, name.c_str(), &bytes), 1);
      }
      add(GEN_IPADD, six ? 16 : 4, &bytes);
    } else {
      add(GEN_DNS, static_cast<int>(name.size()), name.data());
    }
  }
  if (X509_add1_ext_i2d(certificate, NID_subject_alt_name, names.get(), 0, 0) != 1) {
    return Refused("subject alternative names");
  }
  return absl::OkStatus();
}

absl::Status SetValidity(X509* certificate, int64_t not_before_ms, int64_t not_after_ms) {
  if (ASN1_TIME_set(X509_getm_notBefore(certificate), not_before_ms / kMsPerSecond) == nullptr ||
      ASN1_TIME_set(X509_getm_notAfter(certificate), not_after_ms / kMsPerSecond) == nullptr) {
    return Refused("times of the certificate");
  }
  return absl::OkStatus();
}

absl::Status SetSerial(X509* certificate, const std::string& bytes) {
  const OwnedNumber number(BN_bin2bn(reinterpret_cast<const unsigned char*>(bytes.data()),
                                     static_cast<int>(bytes.size()),
                                     nullptr));
  if (number == nullptr ||
      BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(certificate)) == nullptr) {
    return Refused("serial number");
  }
  return absl::OkStatus();
}

void SetCommonName(X509_NAME* name, const std::string& text) {
  CHECK_EQ(X509_NAME_add_entry_by_txt(name,
                                      "CN",
                                      MBSTRING_UTF8,
                                      reinterpret_cast<const unsigned char*>(text.data()),
                                      static_cast<int>(text.size()),
                                      -1,
                                      0),
           1);
}

absl::StatusOr<std::string> Sign(X509* certificate, EVP_PKEY* key) {
  if (X509_sign(certificate, key, EVP_sha256()) <= 0) {
    return Refused("the authority's key does not sign");
  }
  return PemOf(certificate);
}

const char* UseText(CertificateUse use) {
  switch (use) {
    case CertificateUse::kClient:
      return "clientAuth";
    case CertificateUse::kServer:
      return "serverAuth";
    case CertificateUse::kServerAndClient:
      return "serverAuth,clientAuth";
  }
  return "";
}

bool IsP256(EVP_PKEY* key) {
  char group[32] = {};
  size_t length = 0;
  return EVP_PKEY_get_base_id(key) == EVP_PKEY_EC &&
         EVP_PKEY_get_group_name(key, group, sizeof group, &length) == 1 &&
         std::string_view(group, length) == "prime256v1";
}

absl::StatusOr<OwnedRequest> ParseRequest(const std::string& pem) {
  const OwnedBio bio = Reading(pem);
  OwnedRequest request(PEM_read_bio_X509_REQ(bio.get(), nullptr, NoPassword, nullptr));
  if (request == nullptr) {
    return Refused("expected a certificate request in PEM form");
  }
  EVP_PKEY* key = X509_REQ_get0_pubkey(request.get());
  if (key == nullptr || !IsP256(key)) {
    return Refused("the certificate request: expected an ECDSA key on P-256");
  }
  if (X509_REQ_verify(request.get(), key) != 1) {
    return Refused("the certificate request is not signed by its own key");
  }
  return request;
}

int64_t MillisecondsOf(const ASN1_TIME* time) {
  tm parts = {};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? timegm(&parts) * kMsPerSecond : 0;
}

std::string AddressText(const ASN1_OCTET_STRING* bytes) {
  char text[INET6_ADDRSTRLEN] = {};
  const int family = ASN1_STRING_length(bytes) == 4 ? AF_INET : AF_INET6;
  if (ASN1_STRING_length(bytes) != 4 && ASN1_STRING_length(bytes) != 16) {
    return "";
  }
  inet_ntop(family, ASN1_STRING_get0_data(bytes), text, sizeof text);
  return text;
}

void ReadNames(X509* certificate, CertificateFacts& facts) {
  const OwnedNames names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  int uris = 0;
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    int type = 0;
    const auto* value = static_cast<const ASN1_STRING*>(
        GENERAL_NAME_get0_value(sk_GENERAL_NAME_value(names.get(), i), &type));
    const auto text = [value] {
      return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(value)),
                         static_cast<size_t>(ASN1_STRING_length(value)));
    };
    if (type == GEN_URI) {
      facts.uri = ++uris == 1 ? text() : "";  // two owners are none
    } else if (type == GEN_DNS) {
      facts.names.push_back(text());
    } else if (type == GEN_IPADD) {
      facts.names.push_back(AddressText(value));
    }
  }
}

}  // namespace

std::string MakePrivateKey() {
  const OwnedKey key(EVP_EC_gen("P-256"));
  CHECK(key != nullptr);
  const OwnedBio bio(BIO_new(BIO_s_mem()));
  CHECK_EQ(
      PEM_write_bio_PKCS8PrivateKey(bio.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr),
      1);
  return TextOf(bio.get());
}

absl::StatusOr<std::string> MakeCertificateRequest(const std::string& key) {
  ASSIGN_OR_RETURN(const OwnedKey parsed, ParseKey(key));
  const OwnedRequest request(X509_REQ_new());
  CHECK(request != nullptr && X509_REQ_set_version(request.get(), X509_REQ_VERSION_1) == 1);
  if (X509_REQ_set_pubkey(request.get(), parsed.get()) != 1 ||
      X509_REQ_sign(request.get(), parsed.get(), EVP_sha256()) <= 0) {
    return Refused("the private key signs no request");
  }
  const OwnedBio bio(BIO_new(BIO_s_mem()));
  CHECK_EQ(PEM_write_bio_X509_REQ(bio.get(), request.get()), 1);
  return TextOf(bio.get());
}

absl::StatusOr<Authority> MakeAuthority(const std::string& common_name,
                                        int64_t not_before_ms,
                                        int64_t not_after_ms) {
  Authority authority{.certificate = {}, .key = MakePrivateKey()};
  ASSIGN_OR_RETURN(const OwnedKey key, ParseKey(authority.key));
  const OwnedCertificate certificate(X509_new());
  X509* const made = certificate.get();
  CHECK(made != nullptr && X509_set_version(made, X509_VERSION_3) == 1);
  RETURN_IF_ERROR(SetSerial(made, "\x01" + RandomBytes(15)));
  RETURN_IF_ERROR(SetValidity(made, not_before_ms, not_after_ms));
  SetCommonName(X509_get_subject_name(made), common_name);
  CHECK_EQ(X509_set_issuer_name(made, X509_get_subject_name(made)), 1);
  CHECK_EQ(X509_set_pubkey(made, key.get()), 1);
  RETURN_IF_ERROR(Extend(made, made, NID_basic_constraints, "critical,CA:TRUE,pathlen:0"));
  RETURN_IF_ERROR(Extend(made, made, NID_key_usage, "critical,keyCertSign,cRLSign"));
  RETURN_IF_ERROR(Extend(made, made, NID_subject_key_identifier, "hash"));
  ASSIGN_OR_RETURN(authority.certificate, Sign(made, key.get()));
  return authority;
}

absl::StatusOr<std::string> IssueCertificate(const Authority& authority,
                                             const std::string& request,
                                             const CertificateOrder& order) {
  ASSIGN_OR_RETURN(const OwnedRequest asked, ParseRequest(request));
  ASSIGN_OR_RETURN(const OwnedCertificate issuer, ParseCertificate(authority.certificate));
  ASSIGN_OR_RETURN(const OwnedKey key, ParseKey(authority.key));
  const OwnedCertificate certificate(X509_new());
  X509* const made = certificate.get();
  CHECK(made != nullptr && X509_set_version(made, X509_VERSION_3) == 1);
  RETURN_IF_ERROR(SetSerial(made, order.serial));
  RETURN_IF_ERROR(SetValidity(made, order.not_before_ms, order.not_after_ms));
  // No subject name: the URI is the owner. Names are critical then.
  CHECK_EQ(X509_set_issuer_name(made, X509_get_subject_name(issuer.get())), 1);
  CHECK_EQ(X509_set_pubkey(made, X509_REQ_get0_pubkey(asked.get())), 1);
  RETURN_IF_ERROR(Extend(made, issuer.get(), NID_basic_constraints, "critical,CA:FALSE"));
  RETURN_IF_ERROR(Extend(made, issuer.get(), NID_key_usage, "critical,digitalSignature"));
  RETURN_IF_ERROR(Extend(made, issuer.get(), NID_ext_key_usage, UseText(order.use)));
  RETURN_IF_ERROR(Extend(made, issuer.get(), NID_authority_key_identifier, "keyid"));
  RETURN_IF_ERROR(AddNames(made, order));
  return Sign(made, key.get());
}

absl::StatusOr<CertificateFacts> ReadCertificate(const std::string& pem) {
  ASSIGN_OR_RETURN(const OwnedCertificate certificate, ParseCertificate(pem));
  CertificateFacts facts;
  const ASN1_INTEGER* serial = X509_get0_serialNumber(certificate.get());
  facts.serial = Hex(std::string_view(reinterpret_cast<const char*>(ASN1_STRING_get0_data(serial)),
                                      static_cast<size_t>(ASN1_STRING_length(serial))));
  unsigned char digest[EVP_MAX_MD_SIZE] = {};
  unsigned int size = 0;
  CHECK_EQ(X509_digest(certificate.get(), EVP_sha256(), digest, &size), 1);
  facts.fingerprint = Hex(std::string_view(reinterpret_cast<const char*>(digest), size));
  facts.not_before_ms = MillisecondsOf(X509_get0_notBefore(certificate.get()));
  facts.not_after_ms = MillisecondsOf(X509_get0_notAfter(certificate.get()));
  // All bits are set where the certificate does not limit its use.
  facts.is_client = (X509_get_extended_key_usage(certificate.get()) & XKU_SSL_CLIENT) != 0;
  ReadNames(certificate.get(), facts);
  return facts;
}

std::vector<std::string> SplitCertificates(const std::string& pem) {
  const OwnedBio bio = Reading(pem);
  std::vector<std::string> certificates;
  while (true) {
    const OwnedCertificate next(PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr));
    if (next == nullptr) {
      ERR_clear_error();
      return certificates;
    }
    certificates.push_back(PemOf(next.get()));
  }
}

absl::Status CheckAuthority(const Authority& authority, int64_t now_ms) {
  RETURN_IF_ERROR(CheckKeyPair(authority.certificate, authority.key));
  ASSIGN_OR_RETURN(const OwnedCertificate parsed, ParseCertificate(authority.certificate));
  if (X509_check_ca(parsed.get()) != 1 || X509_self_signed(parsed.get(), 1) != 1) {
    return Refused("expected the certificate of an authority that signs itself");
  }
  ASSIGN_OR_RETURN(const CertificateFacts facts, ReadCertificate(authority.certificate));
  return facts.not_before_ms <= now_ms && now_ms < facts.not_after_ms
             ? absl::OkStatus()
             : Refused("the authority's certificate is not in force");
}

absl::Status CheckKeyPair(const std::string& certificate, const std::string& key) {
  ASSIGN_OR_RETURN(const OwnedCertificate parsed, ParseCertificate(certificate));
  ASSIGN_OR_RETURN(const OwnedKey parsed_key, ParseKey(key));
  if (X509_check_private_key(parsed.get(), parsed_key.get()) != 1) {
    return Refused("the private key is not that of the certificate");
  }
  return absl::OkStatus();
}

}  // namespace ravel
