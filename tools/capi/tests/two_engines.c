/* Two engines in one program, through the C interface alone: the calls of a plugin written for it, and calls that must
 * be rejected. Prints one line for each check; the exit status is the number of failed checks. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "transfer_engine_c.h"

static int failures;

static void check(int holds, const char *what) {
    printf("%s: %s\n", holds ? "ok" : "FAILED", what);
    failures += !holds;
}

/* A word derived from its position. */
static uint64_t word_at(uint64_t seed, uint64_t index) {
    uint64_t x = (index + 1) * 0x9e3779b97f4a7c15ull ^ seed;
    return (x ^ x >> 29) * 0xbf58476d1ce4e5b9ull;
}

static void fill(uint64_t *words, size_t count, uint64_t seed, uint64_t first) {
    for (size_t i = 0; i < count; i++) words[i] = word_at(seed, first + i);
}

static int matches(const uint64_t *words, size_t count, uint64_t seed, uint64_t first) {
    for (size_t i = 0; i < count; i++)
        if (words[i] != word_at(seed, first + i)) return 0;
    return 1;
}

/* Waits for every task; returns the first state other than COMPLETED, or COMPLETED. */
static int wait_all(transfer_engine_t engine, batch_id_t batch, size_t tasks) {
    int outcome = STATUS_COMPLETED;
    for (size_t task = 0; task < tasks; task++) {
        struct transfer_status status = {STATUS_WAITING, 0};
        for (long turns = 0; turns < 200000000; turns++) {
            if (getTransferStatus(engine, batch, task, &status) != 0) return STATUS_INVALID;
            if (status.status != STATUS_WAITING && status.status != STATUS_PENDING) break;
        }
        if (status.status != STATUS_COMPLETED && outcome == STATUS_COMPLETED) outcome = status.status;
    }
    return outcome;
}

static int one(transfer_engine_t engine, int opcode, void *source, segment_id_t target, uint64_t offset,
               uint64_t length) {
    struct transfer_request request = {opcode, source, target, offset, length};
    batch_id_t batch = allocateBatchID(engine, 1);
    int submitted = submitTransfer(engine, batch, &request, 1);
    int outcome = submitted == 0 ? wait_all(engine, batch, 1) : -submitted;
    check(freeBatchID(engine, batch) == 0, "a finished batch is freed");
    return outcome;
}

enum { WORDS = 1 << 19, BYTES = WORDS * 8 };

static transfer_engine_t source_engine, target_engine;
static segment_id_t target_segment;
static uint64_t *source_memory, *target_memory;

struct lane {
    int number;
    int wrong;
};

/* One of several threads on one engine: writes and reads back its own ranges. */
static void *hammer(void *argument) {
    struct lane *lane = argument;
    size_t share = WORDS / 8, first = share * (size_t)lane->number;
    for (uint64_t round = 0; round < 200; round++) {
        size_t from = first + (size_t)(word_at(round, 1) % (share / 2)), count = 1 + word_at(round, 2) % (share / 2);
        struct transfer_request request = {OPCODE_WRITE, source_memory + from, target_segment,
                                           (uint64_t)(uintptr_t)(target_memory + from), count * 8};
        fill(source_memory + from, count, round, from);
        for (int pass = 0; pass < 2; pass++) {
            batch_id_t batch = allocateBatchID(source_engine, 1);
            lane->wrong += submitTransfer(source_engine, batch, &request, 1) != 0;
            lane->wrong += wait_all(source_engine, batch, 1) != STATUS_COMPLETED;
            lane->wrong += freeBatchID(source_engine, batch) != 0;
            if (pass == 0) {
                lane->wrong += !matches(target_memory + from, count, round, from);
                fill(source_memory + from, count, ~round, from);
                request.opcode = OPCODE_READ;
            }
        }
        lane->wrong += !matches(source_memory + from, count, round, from);
    }
    return NULL;
}

static void moves_bytes(void) {
    fill(source_memory, WORDS, 1, 0);
    check(one(source_engine, OPCODE_WRITE, source_memory, target_segment, (uint64_t)(uintptr_t)target_memory, BYTES) ==
              STATUS_COMPLETED,
          "a write of the whole segment completes");
    check(matches(target_memory, WORDS, 1, 0), "every word of it is there");
    fill(target_memory, WORDS, 2, 0);
    check(one(source_engine, OPCODE_READ, source_memory + 7, target_segment, (uint64_t)(uintptr_t)(target_memory + 7),
              800) == STATUS_COMPLETED &&
              matches(source_memory + 7, 100, 2, 7) && matches(source_memory + 107, 100, 1, 107),
          "a read brings its range and nothing beside it");
}

static void batches(void) {
    enum { COUNT = 128 };
    struct transfer_request requests[COUNT];
    batch_id_t batch = allocateBatchID(source_engine, COUNT);
    fill(source_memory, WORDS, 3, 0);
    for (size_t i = 0; i < COUNT; i++) {
        requests[i] = (struct transfer_request){OPCODE_WRITE, source_memory + i * 1024, target_segment,
                                                (uint64_t)(uintptr_t)(target_memory + i * 1024), 4096};
    }
    check(submitTransfer(source_engine, batch, requests, COUNT / 2) == 0 &&
              submitTransfer(source_engine, batch, requests + COUNT / 2, COUNT / 2) == 0,
          "a batch takes its transfers in two parts");
    check(submitTransfer(source_engine, batch, requests, 1) == 2, "one more than its room is TOO_MANY_REQUESTS");
    check(wait_all(source_engine, batch, COUNT) == STATUS_COMPLETED, "all of them complete");
    int right = 1;
    for (size_t i = 0; i < COUNT; i++) right &= matches(target_memory + i * 1024, 512, 3, i * 1024);
    check(right, "every block is in its place");
    struct transfer_status status;
    check(getTransferStatus(source_engine, batch, COUNT, &status) == 1, "a task beyond the last is INVALID_ARGUMENT");
    check(freeBatchID(source_engine, batch) == 0, "the batch is freed");
    check(getTransferStatus(source_engine, batch, 0, &status) != 0, "a freed batch is an error, not a crash");
}

static void refusals(void) {
    check(registerLocalMemory(target_engine, target_memory + 100, 800, "*", 1) == -7, "overlap is ADDRESS_OVERLAPPED");
    check(registerLocalMemory(target_engine, (char *)target_memory + BYTES, 0, "*", 1) == -1, "length 0 is refused");
    check(unregisterLocalMemory(target_engine, &failures) == -3, "unknown memory is ADDRESS_NOT_REGISTERED");
    check(openSegment(source_engine, "127.0.0.1:1") < 0, "a segment that is not there has no handle");
    check(one(source_engine, OPCODE_READ, source_memory, target_segment,
              (uint64_t)(uintptr_t)target_memory + BYTES - 100, 200) != STATUS_COMPLETED,
          "a read past the segment's end does not complete");
    check(one(source_engine, OPCODE_WRITE, source_memory, target_segment, UINT64_MAX - 50, 200) != STATUS_COMPLETED,
          "an address that wraps around does not complete");
    check(registerLocalMemory(NULL, source_memory, 8, "*", 1) == -1 && openSegment(NULL, "x") < 0 &&
              openSegment(source_engine, NULL) < 0 && allocateBatchID(NULL, 1) == INVALID_BATCH,
          "null arguments are refused");
    check(installTransport(source_engine, "tcp", NULL) != NULL, "tcp is there");
    void *matrix[] = {"{\"cpu:0\": [[\"no-such-device\"], []]}", NULL};
    check(installTransport(source_engine, "rdma", matrix) == NULL, "RDMA over a device that is not there is not");
    check(installTransport(source_engine, "no-such-transport", NULL) == NULL, "an unknown transport is not");
}

static void files(void) {
    char name[128];
    snprintf(name, sizeof name, "file:///tmp/kvplane-c-%d?create=%d", (int)getpid(), 65536);
    check(openSegment(source_engine, name) == -1, "a file is refused before the transport is installed");
    check(installTransport(source_engine, "file", NULL) != NULL, "files are there");
    int segment = openSegment(source_engine, name);
    check(segment >= 1, "a file opens");
    unsigned char *bytes = (unsigned char *)source_memory;
    for (int at = 0; at < 5000; at++) bytes[at] = (unsigned char)(at * 7 + at / 256);
    check(one(source_engine, OPCODE_WRITE, source_memory, segment, 1001, 5000) == STATUS_COMPLETED, "it is written");
    memset(source_memory, 0, 5000);
    check(one(source_engine, OPCODE_READ, source_memory, segment, 1001, 5000) == STATUS_COMPLETED, "and read");
    int right = 1;
    for (int at = 0; at < 5000; at++) right &= bytes[at] == (unsigned char)(at * 7 + at / 256);
    check(right, "and holds what was written");
    check(one(source_engine, OPCODE_READ, source_memory, segment, 65530, 10) != STATUS_COMPLETED, "it has an end");
    check(closeSegment(source_engine, segment) == 0, "it closes");
    *strchr(name, '?') = 0;
    check(remove(name + strlen("file://")) == 0, "and was where its name says");
}

static void notifications(void) {
    char name[] = "request-17", text[] = "{\"done\":true}";
    notify_msg_t message = {name, text};
    check(genNotifyInEngine(source_engine, (uint64_t)target_segment, message) == 0, "a notification is sent");
    struct transfer_request request = {OPCODE_WRITE, source_memory, target_segment,
                                       (uint64_t)(uintptr_t)target_memory, 4096};
    batch_id_t batch = allocateBatchID(source_engine, 1);
    message.msg = name;
    check(submitTransferWithNotify(source_engine, batch, &request, 1, message) == 0, "a transfer with one is taken");
    check(wait_all(source_engine, batch, 1) == STATUS_COMPLETED, "and completes");
    freeBatchID(source_engine, batch);
    int seen = 0, right = 1;
    for (int turns = 0; turns < 500 && seen < 2; turns++) {
        int count = 0;
        notify_msg_t *messages = getNotifsFromEngine(target_engine, &count);
        for (int i = 0; i < count; i++) {
            const char *expected = seen == 0 ? text : name;
            right &= strcmp(messages[i].name, name) == 0 && strcmp(messages[i].msg, expected) == 0;
            seen++;
        }
        if (messages != NULL) freeNotifsMsgBuf(messages, count);
        usleep(10000);
    }
    check(seen == 2 && right, "both arrive, in order, once");
}

static void shows(void) {
    char text[4096];
    check(showLinks(source_engine, text, sizeof text, 1) == 0 && text[0] != 0, "the links are shown");
    nic_load_stat_t loads[16];
    size_t count = 16;
    check(getNicLoadStats(source_engine, loads, &count) == 0, "loads are told");
    check(discoverTopology(source_engine) == 0 && syncSegmentCache(source_engine) == 0, "what is known is refreshed");
}

int main(void) {
    char address[64];
    target_engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 1);
    source_engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 1);
    check(target_engine != NULL && source_engine != NULL, "two engines start");
    if (failures) return failures;
    check(createTransferEngine("carrier-pigeon://", "a", "b", 0, 1) == NULL, "a strange metadata server is refused");
    source_memory = aligned_alloc(4096, BYTES);
    target_memory = aligned_alloc(4096, BYTES);
    check(registerLocalMemory(source_engine, source_memory, BYTES, "*", 0) == 0, "the source's memory is registered");
    check(registerLocalMemory(target_engine, target_memory, BYTES, "cpu:0", 1) == 0, "the target's too");
    check(getLocalIpAndPort(target_engine, address, sizeof address) == 0 && strchr(address, ':'), "it has an address");
    target_segment = openSegment(source_engine, address);
    check(target_segment >= 1, "its segment opens");
    if (failures) return failures;
    moves_bytes();
    batches();
    refusals();
    notifications();
    shows();
    pthread_t threads[8];
    struct lane lanes[8];
    int wrong = 0;
    for (int i = 0; i < 8; i++) {
        lanes[i] = (struct lane){i, 0};
        pthread_create(&threads[i], NULL, hammer, &lanes[i]);
    }
    for (int i = 0; i < 8; i++) {
        pthread_join(threads[i], NULL);
        wrong += lanes[i].wrong;
    }
    check(wrong == 0, "eight threads share an engine without a wrong word");
    files();
    check(closeSegment(source_engine, target_segment) == 0, "the segment closes");
    check(unregisterLocalMemory(target_engine, target_memory) == 0, "memory is taken back");
    destroyTransferEngine(source_engine);
    destroyTransferEngine(target_engine);
    destroyTransferEngine(NULL);
    free(source_memory);
    free(target_memory);
    return failures;
}
