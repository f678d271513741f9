/* safetensors: what is read is exact, what is damaged is refused by name, what is written is reproducible. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "traces/safetensors.h"

static char folder[] = "/tmp/kvlab-safetensors-XXXXXX";
static char path[512];

static void make_folder(void) {
    cr_assert(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/t.safetensors", folder);
}

static void remove_folder(void) {
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert(system(command) == 0);
}

TestSuite(safetensors, .init = make_folder, .fini = remove_folder);

enum { PADDED = -1, ALL_BITS = -2, UNPADDED = -3 };

/* Length prefix (or one of the words above), header, n_data bytes counting up from 0. */
static void write_raw(const char *to, long long length, const char *header, int n_data) {
    FILE *f = fopen(to, "wb");
    cr_assert(f, "%s", to);
    int padding = length == PADDED ? (int)(-strlen(header) & 7u) : 0;
    unsigned long long n = length < 0 ? strlen(header) + (unsigned)padding : (unsigned)length;
    if (length == ALL_BITS) n = ~0ull;
    for (int i = 0; i < 8; i++) fputc((int)(n >> (8 * i) & 255), f);
    fprintf(f, "%s%*s", header, padding, "");
    for (int i = 0; i < n_data; i++) fputc(i & 63, f);
    fclose(f);
}

#define T(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char *name;
    long long length;
    const char *header;
    int n_data;
    const char *message;
} broken[] = {
    {"length beyond the limit", 100000001, "{}", 0, "at most 100000000"},
    {"length with all bits", ALL_BITS, "{}", 0, "at most 100000000"},
    {"length beyond the file", 400, "{}", 0, "the file is cut"},
    {"no JSON", PADDED, "{\"a\":", 0, "not a JSON object"},
    {"text after the JSON", PADDED, "{} x", 0, "not a JSON object"},
    {"array", PADDED, "[]", 0, "not a JSON object"},
    {"empty header", UNPADDED, "", 0, "not a JSON object"},
    {"bad UTF-8", PADDED, "{\"\xff\":1}", 0, "not a JSON object"},
    {"duplicate name", PADDED,
     "{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[0,4]") "}", 4, "duplicate"},
    {"duplicate key", PADDED, "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F16\"}}", 0, "duplicate"},
    {"entry is a number", PADDED, "{\"a\":1}", 0, "has no dtype"},
    {"no dtype", PADDED, "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "has no dtype"},
    {"float8", PADDED, "{" T("a", "F8_E4M3", "[4]", "[0,4]") "}", 4, "dtype F8_E4M3"},
    {"integers", PADDED, "{" T("a", "I64", "[1]", "[0,8]") "}", 8, "dtype I64"},
    {"lower case", PADDED, "{" T("a", "f32", "[1]", "[0,4]") "}", 4, "dtype f32"},
    {"no shape", PADDED, "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape must be"},
    {"nine dimensions", PADDED, "{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4,
     "at most 8 numbers"},
    {"negative dimension", PADDED, "{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "dimension 0"},
    {"real dimension", PADDED, "{" T("a", "F32", "[1,1.0]", "[0,4]") "}", 4, "dimension 1"},
    {"overflowing shape", PADDED, "{" T("a", "F32", "[4294967296,4294967296]", "[0,4]") "}", 4,
     "overflows"},
    {"size overflows to the range", PADDED, "{" T("a", "F32", "[4611686018427387905]", "[0,4]") "}",
     4, "need 4611686018427387905 elements"},
    {"no offsets", PADDED, "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "data_offsets must be"},
    {"one offset", PADDED, "{" T("a", "F32", "[1]", "[0]") "}", 4, "data_offsets must be"},
    {"reversed", PADDED, "{" T("a", "F32", "[1]", "[4,0]") "}", 4, "data_offsets must be"},
    {"negative offset", PADDED, "{" T("a", "F32", "[1]", "[-4,0]") "}", 4, "data_offsets must be"},
    {"beyond the file", PADDED, "{" T("a", "F32", "[2]", "[0,8]") "}", 4, "data_offsets must be"},
    {"offset beyond 64 bits", PADDED, "{" T("a", "F32", "[1]", "[0,99999999999999999999]") "}", 4,
     "not a JSON object"},
    {"shape too large", PADDED, "{" T("a", "F32", "[2]", "[0,4]") "}", 4, "span 4 bytes"},
    {"shape too small", PADDED, "{" T("a", "BF16", "[1]", "[0,4]") "}", 4, "span 4 bytes"},
    {"odd byte", PADDED, "{" T("a", "F16", "[1]", "[0,3]") "}", 3, "span 3 bytes"},
    {"overlap", PADDED, "{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[4,8]") "}", 8,
     "overlaps"},
    {"hole", PADDED, "{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[8,12]") "}", 12,
     "hole"},
    {"hole at the start", PADDED, "{" T("a", "F32", "[1]", "[4,8]") "}", 8, "hole"},
    {"trailing bytes", PADDED, "{" T("a", "F32", "[1]", "[0,4]") "}", 5, "trailing"},
    {"data without tensors", PADDED, "{}", 4, "trailing"},
    {"misaligned", UNPADDED, "{" T("a", "F32", "[1]", "[0,4]") "}", 4, "not a multiple of 4"},
    {"metadata is a list", PADDED, "{\"__metadata__\":[]}", 0, "__metadata__"},
    {"metadata is a number", PADDED, "{\"__metadata__\":{\"n\":1}}", 0, "does not hold text"},
};

Test(safetensors, broken_files_are_refused_by_name) {
    kv_tensors set;
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        write_raw(path, broken[i].length, broken[i].header, broken[i].n_data);
        cr_expect_eq(kv_safetensors_open(path, &set), KV_E_DATA, "case=%s", broken[i].name);
        cr_expect(strstr(kv_error_message(), broken[i].message), "case=%s message=%s",
                  broken[i].name, kv_error_message());
        cr_expect(strstr(kv_error_message(), path), "case=%s names the file: %s", broken[i].name,
                  kv_error_message());
        cr_expect_null(set.tensor, "case=%s leaves nothing behind", broken[i].name);
    }
    for (int n = 0; n < 8; n++) {
        FILE *f = fopen(path, "wb");
        for (int b = 0; b < n; b++) fputc(0, f);
        fclose(f);
        cr_expect_eq(kv_safetensors_open(path, &set), KV_E_DATA, "case=%d bytes", n);
    }
    unlink(path);
    cr_expect_eq(kv_safetensors_open(path, &set), KV_E_NOINPUT, "case=missing");
    cr_expect_eq(kv_safetensors_open(folder, &set), KV_E_NOINPUT, "case=folder");
}

Test(safetensors, every_cut_of_a_valid_file_is_refused) {
    const float value[3] = {1, 2, 3};
    const kv_tensor_out out = {"a", 1, {3}, value};
    kv_tensors set;
    cr_assert_eq(kv_safetensors_write(path, &out, 1, NULL), KV_OK, "%s", kv_error_message());
    FILE *f = fopen(path, "rb");
    char bytes[256];
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    for (size_t keep = 0; keep < n; keep++) {
        f = fopen(path, "wb");
        fwrite(bytes, 1, keep, f);
        fclose(f);
        cr_expect_eq(kv_safetensors_open(path, &set), KV_E_DATA, "kept %zu of %zu bytes", keep, n);
    }
}

Test(safetensors, values_types_metadata_and_hash) {
    /* 0x3f80 is 1.0 in bf16, 0x3c00 is 1.0 in f16; f32 comes first to be aligned. */
    static const unsigned char data[] = {0,    0,    0x80, 0x3f, 0,    0, 0,
                                         0xc0, 0x80, 0x3f, 0,    0x3c, 0, 0xc0};
    static const char header[] = "{\"__metadata__\":{\"z\":\"last\",\"format\":\"pt\"}," T(
        "x", "F32", "[2,1]", "[0,8]") "," T("half", "F16", "[2]",
                                            "[10,14]") "," T("b", "BF16", "[]",
                                                             "[8,10]") "," T("none", "F32", "[0,5]",
                                                                             "[8,8]") "}";
    write_raw(path, PADDED, header, 0);
    FILE *f = fopen(path, "ab");
    fwrite(data, 1, sizeof data, f);
    fclose(f);
    kv_tensors set;
    const kv_tensor *t;
    float got[2];
    cr_assert_eq(kv_safetensors_open(path, &set), KV_OK, "%s", kv_error_message());
    cr_assert_eq(set.n_tensor, 4);
    for (int i = 1; i < set.n_tensor; i++)
        cr_expect(strcmp(set.tensor[i - 1].name, set.tensor[i].name) < 0, "sorted at %d", i);
    cr_assert_eq(kv_tensors_get(&set, "x", 2, (int64_t[]){2, 1}, &t), KV_OK);
    cr_assert_eq(kv_tensor_read(&set, t, got), KV_OK);
    cr_expect(got[0] == 1.0f && got[1] == -2.0f, "x = %g %g", (double)got[0], (double)got[1]);
    cr_assert_eq(kv_tensors_get(&set, "half", 1, (int64_t[]){2}, &t), KV_OK);
    cr_assert_eq(kv_tensor_read(&set, t, got), KV_OK);
    cr_expect(got[0] == 1.0f && got[1] == -2.0f, "half = %g %g", (double)got[0], (double)got[1]);
    cr_assert_eq(kv_tensors_get(&set, "b", 0, NULL, &t), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_tensor_read(&set, t, got), KV_OK);
    cr_expect(t->n_element == 1 && got[0] == 1.0f, "scalar b = %g", (double)got[0]);
    cr_expect_eq(kv_tensors_find(&set, "none")->n_element, 0);
    cr_expect_null(kv_tensors_find(&set, "absent"));
    cr_expect_str_eq(kv_tensors_meta(&set, "format"), "pt");
    cr_expect_str_eq(kv_tensors_meta(&set, "z"), "last");
    cr_expect_null(kv_tensors_meta(&set, "a"));
    cr_expect_eq(kv_tensors_get(&set, "x", 1, (int64_t[]){2}, &t), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "has shape [2, 1], expected [2]"), "%s",
              kv_error_message());
    cr_expect_eq(kv_tensors_get(&set, "y", 1, (int64_t[]){2}, &t), KV_E_DATA);
    cr_expect(strstr(kv_error_message(), "\"y\" of shape [2] is missing"), "%s",
              kv_error_message());
    unsigned char whole[1024];
    f = fopen(path, "rb");
    size_t n = fread(whole, 1, sizeof whole, f);
    fclose(f);
    XXH128_hash_t hash = XXH3_128bits(whole, n);
    cr_expect(hash.high64 == set.hash[0] && hash.low64 == set.hash[1], "hash of the whole file");
    kv_tensors_free(&set);
}

static size_t slurp(const char *from, char *out, size_t size) {
    FILE *f = fopen(from, "rb");
    cr_assert(f, "%s", from);
    size_t n = fread(out, 1, size, f);
    fclose(f);
    return n;
}

Test(safetensors, written_files_are_reproducible) {
    const float a[6] = {1, -0.0f, 3e38f, 1e-45f, 5, 6}, b[2] = {7, 8};
    const kv_tensor_out one[2] = {{"layers.0.w", 2, {2, 3}, a}, {"A", 1, {2}, b}};
    const kv_tensor_out two[2] = {one[1], one[0]};
    const char *const meta_one[] = {"policy", "kvpop", "budget", "2048", NULL};
    const char *const meta_two[] = {"budget", "2048", "policy", "kvpop", NULL};
    char first[1024], second[1024], other[600];
    kv_tensors set;
    const kv_tensor *t;
    float got[6];
    cr_assert_eq(kv_safetensors_write(path, one, 2, meta_one), KV_OK, "%s", kv_error_message());
    size_t n = slurp(path, first, sizeof first);
    cr_assert_eq(kv_safetensors_write(path, two, 2, meta_two), KV_OK, "%s", kv_error_message());
    cr_expect(slurp(path, second, sizeof second) == n && memcmp(first, second, n) == 0,
              "the order of the arguments does not matter");
    cr_expect_eq((unsigned char)first[0] % 8, 0, "the header is padded to 8 bytes");
    cr_assert_eq(kv_safetensors_open(path, &set), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_tensors_get(&set, "layers.0.w", 2, (int64_t[]){2, 3}, &t), KV_OK);
    cr_assert_eq(kv_tensor_read(&set, t, got), KV_OK);
    cr_expect_eq(memcmp(got, a, sizeof a), 0, "bit-exact round trip");
    cr_expect_str_eq(kv_tensors_meta(&set, "policy"), "kvpop");
    kv_tensors_free(&set);

    const float bad[2] = {1, NAN};
    const kv_tensor_out nan = {"w", 1, {2}, bad};
    snprintf(other, sizeof other, "%s/nan.safetensors", folder);
    cr_expect_eq(kv_safetensors_write(other, &nan, 1, NULL), KV_E_DATA);
    cr_expect_neq(access(other, F_OK), 0, "nothing is left of a refused file");
    const kv_tensor_out twice[2] = {one[0], one[0]};
    cr_expect_eq(kv_safetensors_write(other, twice, 2, NULL), KV_E_INTERNAL);
    snprintf(other, sizeof other, "%s/absent/x.safetensors", folder);
    cr_expect_eq(kv_safetensors_write(other, one, 2, NULL), KV_E_CANTCREATE);
    cr_assert_eq(kv_safetensors_write(path, NULL, 0, NULL), KV_OK, "no tensors at all");
    cr_assert_eq(kv_safetensors_open(path, &set), KV_OK, "%s", kv_error_message());
    cr_expect_eq(set.n_tensor, 0);
    cr_expect_null(kv_tensors_find(&set, "x"));
    kv_tensors_free(&set);
}

Test(safetensors, sharded_files) {
    const float value[2] = {1, 2};
    const kv_tensor_out a = {"a", 1, {2}, value}, b = {"b", 1, {1}, value};
    static const struct {
        const char *name, *index;
        kv_status status;
        const char *message;
    } c[] = {
        {"good", "{\"weight_map\":{\"a\":\"1\",\"b\":\"2\"}}", KV_OK, ""},
        {"one of the two", "{\"weight_map\":{\"a\":\"1\"}}", KV_OK, ""},
        {"tensor in no shard", "{\"weight_map\":{\"a\":\"1\",\"c\":\"2\"}}", KV_E_DATA,
         "\"c\" is not in any shard"},
        {"missing shard", "{\"weight_map\":{\"a\":\"1\",\"b\":\"9\"}}", KV_E_NOINPUT, "/9"},
        {"another folder", "{\"weight_map\":{\"a\":\"../1\"}}", KV_E_DATA, "same folder"},
        {"not a text", "{\"weight_map\":{\"a\":1}}", KV_E_DATA, "same folder"},
        {"same tensor twice", "{\"weight_map\":{\"a\":\"1\",\"b\":\"3\"}}", KV_E_DATA,
         "stands in two shards"},
        {"empty map", "{\"weight_map\":{}}", KV_E_DATA, "weight_map must be"},
        {"no map", "{}", KV_E_DATA, "weight_map must be"},
        {"duplicate key", "{\"weight_map\":{\"a\":\"1\",\"a\":\"1\"}}", KV_E_DATA, "duplicate"},
        {"no JSON", "weight_map", KV_E_DATA, "index.json:1"},
    };
    char shard[600], index[600];
    const kv_tensor_out *const content[] = {&a, &b, &a};
    for (int i = 0; i < 3; i++) {
        snprintf(shard, sizeof shard, "%s/%d", folder, i + 1);
        cr_assert_eq(kv_safetensors_write(shard, content[i], 1, NULL), KV_OK);
    }
    snprintf(shard, sizeof shard, "%s/3", folder);
    cr_assert_eq(kv_safetensors_write(shard, (kv_tensor_out[]){a, b}, 2, NULL), KV_OK);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", folder);
    kv_tensors set;
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        FILE *f = fopen(index, "w");
        fputs(c[i].index, f);
        fclose(f);
        kv_status st = kv_safetensors_open(index, &set);
        cr_expect_eq(st, c[i].status, "case=%s status=%d %s", c[i].name, (int)st,
                     kv_error_message());
        if (st != KV_OK)
            cr_expect(strstr(kv_error_message(), c[i].message), "case=%s message=%s", c[i].name,
                      kv_error_message());
        else
            cr_expect(kv_tensors_find(&set, "a")->n_element == 2, "case=%s", c[i].name);
        kv_tensors_free(&set);
    }
    unlink(index);
    cr_expect_eq(kv_safetensors_open(index, &set), KV_E_NOINPUT);
}
