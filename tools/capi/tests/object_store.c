/* A store through the C interface alone, as programs written for Mooncake's store_c.h use it. Arguments: the address of
 * the control plane. Prints one line for each check; the exit status is the number of failed checks. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store_c.h"

static int failures;

static void check(int holds, const char *what) {
    printf("%s: %s\n", holds ? "ok" : "FAILED", what);
    failures += !holds;
}

enum { SIZE = 1 << 20, COUNT = 8 };

static void fill(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) bytes[i] = (unsigned char)((i * 2654435761u + seed) >> 13);
}

static mooncake_store_t opened(const char *master, uint64_t segment) {
    mooncake_store_t store = mooncake_store_create();
    check(mooncake_store_health_check(store) == 1, "a store that is not set up");
    check(mooncake_store_put(store, "k", "v", 1, NULL) == -1, "no put before the setup");
    check(mooncake_store_setup(store, "localhost", "P2PHANDSHAKE", segment, 1 << 20, "tcp", "", master) == 0, "the setup");
    check(mooncake_store_health_check(store) == 0, "the cluster answers");
    return store;
}

static void values(mooncake_store_t store, mooncake_store_t other) {
    char value[64];
    mooncake_replicate_config_t config = {.replica_num = 1, .with_soft_pin = 1};
    check(mooncake_store_register_buffer(other, value, sizeof value) == 0, "memory of a get is registered");
    check(mooncake_store_put(store, "name", "value", 5, NULL) == 0, "a put");
    check(mooncake_store_put(store, "name", "other", 5, NULL) == 0, "a put of what exists");
    check(mooncake_store_put(store, "pinned", "value", 5, &config) == 0, "a put with a pin");
    check(mooncake_store_get_into(other, "name", value, sizeof value) == 5 && !memcmp(value, "value", 5),
          "another store reads it, unchanged");
    check(mooncake_store_get_into(other, "name", value, 3) == -600, "no room for it");
    check(mooncake_store_get_into(other, "none", value, sizeof value) == -704, "no such object");
    check(mooncake_store_get_size(other, "name") == 5 && mooncake_store_get_size(other, "none") == -704, "its length");
    check(mooncake_store_is_exist(other, "name") == 1 && mooncake_store_is_exist(other, "none") == 0, "whether it exists");
    check(mooncake_store_put(store, "empty", "", 0, NULL) == -600, "no empty object");
    check(mooncake_store_remove(other, "name", 0) == 0 && mooncake_store_remove(other, "name", 1) == -704, "it is removed");
    check(mooncake_store_unregister_buffer(other, value) == 0, "the memory is unregistered");
    check(mooncake_store_unregister_buffer(other, value) == -600, "once");
    check(mooncake_store_get_into(other, "pinned", value, sizeof value) == -600, "no get into other memory");
}

static void batches(mooncake_store_t store, mooncake_store_t other) {
    unsigned char *from = malloc(SIZE * COUNT), *into = malloc(SIZE * COUNT);
    char names[COUNT + 1][16];
    const char *keys[COUNT + 1];
    void *sources[COUNT + 1], *targets[COUNT + 1];
    size_t sizes[COUNT + 1];
    int codes[COUNT + 1];
    int64_t lengths[COUNT + 1];
    fill(from, SIZE * COUNT, 7);
    for (int i = 0; i <= COUNT; i++) {
        snprintf(names[i], sizeof names[i], "batch/%d", i);
        keys[i] = names[i], sizes[i] = SIZE - (size_t)i;
        sources[i] = from + (size_t)SIZE * (size_t)(i % COUNT), targets[i] = into + (size_t)SIZE * (size_t)(i % COUNT);
    }
    check(mooncake_store_register_buffer(store, from, SIZE * COUNT) == 0, "sources are registered");
    check(mooncake_store_register_buffer(store, from + 5, 10) == -600, "not twice");
    check(mooncake_store_register_buffer(other, into, SIZE * COUNT) == 0, "targets are registered");
    check(mooncake_store_batch_put_from(store, keys, sources, sizes, COUNT, NULL, codes) == 0, "a batch is put");
    int good = 1;
    for (int i = 0; i < COUNT; i++) good &= codes[i] == 0;
    check(good, "each is stored");
    check(mooncake_store_batch_is_exist(other, keys, COUNT + 1, codes) == 0 && codes[0] == 1 && codes[COUNT] == 0,
          "which exist");
    check(mooncake_store_batch_get_into(other, keys, targets, sizes, COUNT + 1, lengths) == 0, "a batch is read");
    for (int i = 0; i < COUNT; i++) {
        good &= lengths[i] == (int64_t)sizes[i] && !memcmp(sources[i], targets[i], sizes[i]);
    }
    check(good && lengths[COUNT] == -704, "each is read, and the missing one is reported");
    check(mooncake_store_put_from(store, "alone", from, SIZE, NULL) == 0 && mooncake_store_get_size(other, "alone") == SIZE,
          "one object from registered memory");
    check(mooncake_store_remove_by_regex(store, "^batch/[0-3]$", 0) == 4, "removal by pattern");
    check(mooncake_store_remove_by_regex(store, "(", 0) < 0, "a malformed pattern");
    check(mooncake_store_remove_all(store, 1) >= COUNT - 4, "removal of all");
    check(mooncake_store_is_exist(other, "alone") == 0, "nothing is left");
    check(mooncake_store_unregister_buffer(store, from) == 0 && mooncake_store_unregister_buffer(other, into) == 0,
          "memory goes");
    free(from), free(into);
}

/* Memory with fewer rights than a call needs, or none any more, is an error and no crash. */
static void memory(mooncake_store_t store) {
    int map = MAP_PRIVATE | MAP_ANONYMOUS;
    char value[16];
    void *fixed = mmap(NULL, SIZE, PROT_READ, map, -1, 0);
    check(mooncake_store_put(store, "memory", "value", 5, NULL) == 0, "an object to read");
    check(mooncake_store_register_buffer(store, fixed, SIZE) == 0, "read-only memory is registered");
    check(mooncake_store_get_into(store, "memory", fixed, SIZE) == -600, "no get into it");
    check(mooncake_store_put_from(store, "of read-only memory", fixed, 4096, NULL) == 0, "a put from it");
    check(mooncake_store_unregister_buffer(store, fixed) == 0, "it is unregistered");
    munmap(fixed, SIZE);
    check(mooncake_store_register_buffer(store, fixed, SIZE) == -600, "unmapped memory is not registered");
    check(mooncake_store_put(store, "of nothing", fixed, 4096, NULL) == -600, "nor put");
    void *gone = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, map, -1, 0);
    check(mooncake_store_register_buffer(store, gone, SIZE) == 0, "memory is registered");
    munmap(gone, SIZE);
    check(mooncake_store_get_into(store, "memory", gone, SIZE) == -600, "no get into what was unmapped since");
    check(mooncake_store_put_from(store, "of nothing", gone, 4096, NULL) == -600, "no put from it");
    check(mooncake_store_is_exist(store, "of nothing") == 0, "nothing was put");
    check(mooncake_store_unregister_buffer(store, gone) == 0, "it is unregistered");
    check(mooncake_store_register_buffer(store, (void *)4096, 64) == -600, "no memory at such an address");
    check(mooncake_store_register_buffer(store, value, ~(size_t)0) == -600, "nor of such a length");
}

static void replicas(mooncake_store_t store) {
    size_t counts[] = {0, 1, 2, 8, 9, 300, ~(size_t)0};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        char key[32];
        mooncake_replicate_config_t config = {.replica_num = counts[i]};
        snprintf(key, sizeof key, "replicas/%zu", i);
        check(mooncake_store_put(store, key, "v", 1, &config) == 0, "replicas as far as there can be");
    }
}

static void before_the_setup(void) {
    mooncake_store_t store = mooncake_store_create();
    const char *keys[2] = {"a", "b"};
    char bytes[2];
    void *buffers[2] = {bytes, bytes + 1};
    size_t sizes[2] = {1, 1};
    int codes[2] = {0, 0};
    int64_t lengths[2] = {0, 0};
    check(mooncake_store_batch_put_from(store, keys, buffers, sizes, 2, NULL, codes) == -1 && codes[0] == -1
              && codes[1] == -1, "no batch of puts before the setup");
    check(mooncake_store_batch_get_into(store, keys, buffers, sizes, 2, lengths) == -1 && lengths[1] == -1,
          "nor of gets");
    codes[1] = 0;
    check(mooncake_store_batch_is_exist(store, keys, 2, codes) == -1 && codes[1] == -1, "nor of lookups");
    check(mooncake_store_register_buffer(store, bytes, 2) == -1, "no memory is registered before the setup");
    check(mooncake_store_unregister_buffer(store, bytes) == -1, "nor unregistered");
    mooncake_store_destroy(store);
    check(mooncake_store_health_check(store) == -1, "a store that was destroyed");
    check(mooncake_store_put(store, "k", "v", 1, NULL) == -1, "no put with it");
    mooncake_store_destroy(store);
    mooncake_store_destroy((mooncake_store_t)bytes);
}

static void null_pointers(mooncake_store_t store) {
    int code;
    int64_t length;
    size_t size = 1;
    const char *keys[1] = {NULL};
    void *buffers[1] = {NULL};
    check(mooncake_store_put(NULL, "k", "v", 1, NULL) == -1, "no store");
    check(mooncake_store_put(store, NULL, "v", 1, NULL) == -1, "no key");
    check(mooncake_store_put(store, "k", NULL, 1, NULL) == -1, "no value");
    check(mooncake_store_batch_put_from(store, keys, buffers, &size, 1, NULL, &code) == -1, "no key in a batch");
    check(mooncake_store_batch_get_into(store, NULL, buffers, &size, 1, &length) == -1, "no keys");
    check(mooncake_store_register_buffer(store, NULL, 1) == -1, "no memory");
    check(mooncake_store_get_hostname(store, NULL, 10) == -1, "no room for a name");
    mooncake_store_destroy(NULL);
}

struct work {
    mooncake_store_t store;
    int number, failed;
};

static void *use(void *argument) {
    struct work *work = argument;
    char key[32], value[256], back[256];
    if (mooncake_store_register_buffer(work->store, back, sizeof back) != 0) work->failed++;
    for (int turn = 0; turn < 50; turn++) {
        snprintf(key, sizeof key, "thread/%d/%d", work->number, turn);
        memset(value, work->number * 50 + turn, sizeof value);
        work->failed += mooncake_store_put(work->store, key, value, sizeof value, NULL) != 0;
        work->failed += mooncake_store_get_into(work->store, key, back, sizeof back) != (int64_t)sizeof back;
        work->failed += memcmp(value, back, sizeof back) != 0;
    }
    work->failed += mooncake_store_unregister_buffer(work->store, back) != 0;
    return NULL;
}

/* A store belongs to its process: a forked child gets errors, and ends nothing of the parent's. */
static void forks(mooncake_store_t store) {
    char value[8];
    pid_t child = fork();
    if (child == 0) {
        int refused = mooncake_store_put(store, "of the child", "v", 1, NULL) < 0
            && mooncake_store_get_into(store, "name", value, sizeof value) < 0
            && mooncake_store_is_exist(store, "name") < 0 && mooncake_store_health_check(store) != 0;
        mooncake_store_destroy(store);
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    check(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "a forked child is refused");
    check(mooncake_store_put(store, "of the parent", "v", 1, NULL) == 0, "the parent goes on");
    check(mooncake_store_is_exist(store, "of the child") == 0, "the child put nothing");
}

static void threads(mooncake_store_t store) {
    enum { THREADS = 6 };
    pthread_t ids[THREADS];
    struct work work[THREADS];
    int failed = 0;
    for (int i = 0; i < THREADS; i++) {
        work[i] = (struct work){store, i, 0};
        pthread_create(&ids[i], NULL, use, &work[i]);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(ids[i], NULL), failed += work[i].failed;
    check(failed == 0, "threads share a store");
}

int main(int count, char **words) {
    if (count != 2) return 99;
    char name[128];
    mooncake_store_t member = opened(words[1], 64 << 20), client = opened(words[1], 0);
    check(mooncake_store_setup(client, "localhost", "", 0, 0, "tcp", "", words[1]) == -1, "no second setup");
    mooncake_store_t none = mooncake_store_create();
    check(mooncake_store_setup(none, "localhost", "", 0, 0, "efa", "", words[1]) == -600, "no such protocol");
    check(mooncake_store_setup(none, "localhost", "", 0, 0, "tcp", "", "127.0.0.1:1") == -900, "no such control plane");
    mooncake_store_destroy(none);
    check(mooncake_store_get_hostname(member, name, sizeof name) == 0 && strchr(name, ':') != NULL, "a member has a name");
    check(mooncake_store_get_hostname(member, name, 4) == -1, "which needs room");
    values(client, member);
    batches(client, member);
    memory(client);
    replicas(client);
    before_the_setup();
    null_pointers(client);
    forks(client);
    threads(client);
    mooncake_store_destroy(client);
    mooncake_store_destroy(member);
    mooncake_store_destroy(member);
    return failures;
}
