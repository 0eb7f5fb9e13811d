/* Memory of a device through the C interface, over the driver for tests: its memory crashes a process that touches it,
 * so the program reads and writes it by the driver. Prints one line for each check; the exit status is the number of
 * failed checks. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tent/transfer_engine.h"
#include "transfer_engine_c.h"

enum { BYTES = 3 << 20 };

static int failures;

static void check(int holds, const char *what) {
    printf("%s: %s\n", holds ? "ok" : "FAILED", what);
    failures += !holds;
}

static int transfer(transfer_engine_t engine, int opcode, void *source, segment_id_t target, uint64_t offset) {
    struct transfer_request request = {opcode, source, target, offset, BYTES};
    struct transfer_status status = {STATUS_WAITING, 0};
    batch_id_t batch = allocateBatchID(engine, 1);
    int submitted = submitTransfer(engine, batch, &request, 1);
    if (submitted != 0) return -submitted;
    while (status.status == STATUS_WAITING || status.status == STATUS_PENDING)
        if (getTransferStatus(engine, batch, 0, &status) != 0) return STATUS_INVALID;
    freeBatchID(engine, batch);
    return status.status;
}

int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
    uint64_t (*allocate)(size_t, uint64_t) = (uint64_t(*)(size_t, uint64_t))dlsym(driver, "kvplane_fake_allocate");
    int (*release)(uint64_t) = (int (*)(uint64_t))dlsym(driver, "kvplane_fake_free");
    int (*reach)(uint64_t, void *, uint64_t, int) =
        (int (*)(uint64_t, void *, uint64_t, int))dlsym(driver, "kvplane_fake_access");
    uint64_t ours = allocate(0, BYTES), theirs = allocate(1, BYTES);
    unsigned char *bytes = malloc(BYTES), *found = malloc(BYTES);
    for (int at = 0; at < BYTES; at++) bytes[at] = (unsigned char)(at * 7 + at / 256);

    transfer_engine_t prefill = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    transfer_engine_t decode = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    check(prefill != NULL && decode != NULL, "two engines");
    check(installTransport(prefill, "tcp", NULL) != NULL && installTransport(decode, "tcp", NULL) != NULL, "tcp");
    char name[256];
    check(getLocalIpAndPort(decode, name, sizeof name) == 0, "the name of the second");

    void *here = (void *)(uintptr_t)ours, *there = (void *)(uintptr_t)theirs;
    check(registerLocalMemory(prefill, here, BYTES, "cuda:1", 1) == -1, "memory of cuda:0 is not on cuda:1");
    check(registerLocalMemory(prefill, here, BYTES, "cpu:0", 1) == -1, "nor of the host");
    check(registerLocalMemory(prefill, bytes, BYTES, "cuda:0", 1) == -1, "memory of the host is not on cuda:0");
    check(registerLocalMemory(prefill, here, 2 * (size_t)BYTES + (8 << 20), "*", 1) != 0, "longer than the allocation");
    check(registerLocalMemory(prefill, here, BYTES, "cuda:0", 1) == 0, "memory of cuda:0");
    check(registerLocalMemory(decode, there, BYTES, "*", 1) == 0, "memory of cuda:1, found by its address");
    check(registerLocalMemory(decode, bytes, BYTES, "*", 1) == 0, "memory of the host");

    segment_id_t segment = openSegment(prefill, name);
    check(segment >= 0, "the segment of the second");
    check(reach(ours, bytes, BYTES, 1) == 1, "bytes on the first device");
    check(transfer(prefill, OPCODE_WRITE, here, segment, theirs) == STATUS_COMPLETED, "a write between devices");
    check(reach(theirs, found, BYTES, 0) == 1 && memcmp(bytes, found, BYTES) == 0, "whose bytes arrive");
    memset(bytes, 0, BYTES);
    check(transfer(prefill, OPCODE_WRITE, here, segment, (uint64_t)(uintptr_t)bytes) == STATUS_COMPLETED, "to a host");
    check(memcmp(bytes, found, BYTES) == 0, "the same");
    memset(bytes, 9, BYTES);
    check(transfer(prefill, OPCODE_READ, here, segment, (uint64_t)(uintptr_t)bytes) == STATUS_COMPLETED, "from a host");
    check(reach(ours, found, BYTES, 0) == 1 && memcmp(bytes, found, BYTES) == 0, "the same");

    tent_engine_t tent = tent_create_engine();
    void *allocated = NULL;
    check(tent_allocate_memory(tent, &allocated, BYTES, "cuda:1") == 0, "memory of cuda:1 from an engine of TENT's");
    check(tent_register_memory(tent, allocated, BYTES) == 0, "is registered");
    check(tent_segment_name(tent, name, sizeof name) == 0, "the name of its engine");
    segment_id_t other = openSegment(prefill, name);
    check(other >= 0, "its segment");
    check(transfer(prefill, OPCODE_WRITE, here, other, (uint64_t)(uintptr_t)allocated) == STATUS_COMPLETED, "a write");
    check(reach((uint64_t)(uintptr_t)allocated, found, BYTES, 0) == 1 && memcmp(bytes, found, BYTES) == 0, "arrives");
    check(tent_free_memory(tent, allocated) == 0 && tent_free_memory(tent, allocated) == -1, "it is freed, once");
    tent_destroy_engine(tent);

    check(unregisterLocalMemory(prefill, here) == 0 && unregisterLocalMemory(decode, there) == 0, "unregistered");
    check(unregisterLocalMemory(decode, bytes) == 0, "memory of the host, too");
    check(release(ours) == 1 && release(theirs) == 1, "freed");
    destroyTransferEngine(prefill);
    destroyTransferEngine(decode);
    return failures;
}
