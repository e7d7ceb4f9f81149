/* What SGLang's hash of pages, which is compiled at the first request, takes from OpenSSL's headers. */
#pragma once
#include <stddef.h>

#define SHA256_DIGEST_LENGTH 32
#define SHA_LBLOCK 16

#ifdef __cplusplus
extern "C" {
#endif
typedef struct SHA256state_st {
    unsigned int h[8];
    unsigned int Nl, Nh;
    unsigned int data[SHA_LBLOCK];
    unsigned int num, md_len;
} SHA256_CTX;

int SHA256_Init(SHA256_CTX *context);
int SHA256_Update(SHA256_CTX *context, const void *data, size_t length);
int SHA256_Final(unsigned char *digest, SHA256_CTX *context);
#ifdef __cplusplus
}
#endif
