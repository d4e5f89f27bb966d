/* Copies samples out of mapped or open shards into a batch. Compiled at first use; gather.py does the same without it.
 *
 * Shuffled samples are far apart: the processor's own prefetching starts again with each, and each is on pages whose
 * addresses it does not know. So the lines of the next sample are asked for while this one is copied, and one line of
 * each page of the sample after that.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define LINE 64
#define PAGE 4096
#define CHUNK 256
#define MOST_PARTS 1024
#define LARGEST_GAP 4096

static void copy_one(uint8_t *to, const uint8_t *from, int64_t size, const uint8_t *next, int64_t next_size) {
    int64_t at = 0;
    for (; at + LINE <= size; at += LINE) {
        if (at < next_size) __builtin_prefetch(next + at, 0, 3);
        memcpy(to + at, from + at, LINE);
    }
    memcpy(to + at, from + at, size - at);
}

/* How many samples ahead is far enough: a few kilobytes. */
static int64_t distance(int64_t size) {
    int64_t samples = size > 0 ? 2048 / size : 16;
    return samples < 1 ? 1 : samples > 16 ? 16 : samples;
}

/* Copy the field of n samples, all of `size` bytes, one after the other into `out`.
 *
 * starts[shards + 1]: the first sample of each shard; first[shard]: where the field of its row 0 lies in memory, 0 where
 * the shard is not mapped or the field has no stride; stride and sizes as they are in the shard;
 * used[shard]: becomes `batch` where it was copied from.
 * Returns how many were copied: all, or those before the first that must be looked at.
 */
int64_t gather_strided(const int64_t *ids, int64_t n, const int64_t *starts, int64_t shards, const int64_t *first,
                       const int64_t *stride, const int64_t *sizes, int64_t size, uint8_t *out, int64_t *used,
                       int64_t batch) {
    const uint8_t *from[CHUNK];
    int64_t done = 0, shard = 0, ahead = distance(size);
    while (done < n) {
        int64_t count = 0;
        for (; count < CHUNK && done + count < n; count++) {
            int64_t id = ids[done + count];
            if (id < 0 || id >= starts[shards]) break;
            if (id < starts[shard] || id >= starts[shard + 1]) {
                int64_t low = 0, high = shards; /* starts[low] <= id < starts[high] */
                while (high - low > 1) {
                    int64_t middle = low + (high - low) / 2;
                    if (starts[middle] <= id) low = middle; else high = middle;
                }
                shard = low;
            }
            if (first[shard] == 0 || sizes[shard] != size) break;
            used[shard] = batch;
            from[count] = (const uint8_t *)(intptr_t)first[shard] + (id - starts[shard]) * stride[shard];
        }
        for (int64_t i = 0; i < count; i++) {
            int has_next = i + ahead < count;
            if (i + 2 * ahead < count)
                for (int64_t at = 0; at < size; at += PAGE) __builtin_prefetch(from[i + 2 * ahead] + at, 0, 3);
            copy_one(out + (done + i) * size, from[i], size, has_next ? from[i + ahead] : from[i], has_next ? size : 0);
        }
        done += count;
        if (count < CHUNK) break;
    }
    return done;
}

/* Copy n pieces, of `sizes` bytes at `from` in memory, one after the other into `out`. */
void gather_scattered(const int64_t *from, const int64_t *sizes, int64_t n, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) {
        int has_next = i + 1 < n;
        copy_one(out, (const uint8_t *)(intptr_t)from[i], sizes[i],
                 (const uint8_t *)(intptr_t)from[has_next ? i + 1 : i], has_next ? sizes[i + 1] : 0);
        out += sizes[i];
    }
}

/* How many of the n ids, from the first on, follow each other. */
int64_t run_length(const int64_t *ids, int64_t n) {
    int64_t length = n > 0;
    while (length < n && ids[length] == ids[length - 1] + 1) length++;
    return length;
}

/* Read n pieces of `size` bytes, `stride` apart, from `offset` of an open file: what lies between is thrown away.
 *
 * Returns how many are whole; fewer than n at the end of the file, at an error, or for gaps above 4096 bytes.
 */
int64_t read_run(int fd, int64_t offset, int64_t n, int64_t stride, int64_t size, uint8_t *out) {
    struct iovec parts[MOST_PARTS];
    uint8_t gap[LARGEST_GAP];
    if (size <= 0 || stride < size || stride - size > LARGEST_GAP) return 0;
    int64_t done = 0;
    while (done < n) {
        int64_t rows = n - done, count = 0, asked;
        if (stride == size) {
            parts[count++] = (struct iovec){out + done * size, (size_t)(rows * size)};
            asked = rows * size;
        } else {
            if (rows > MOST_PARTS / 2) rows = MOST_PARTS / 2;
            for (int64_t i = 0; i < rows; i++) {
                if (i) parts[count++] = (struct iovec){gap, (size_t)(stride - size)};
                parts[count++] = (struct iovec){out + (done + i) * size, (size_t)size};
            }
            asked = rows * stride - (stride - size);
        }
        ssize_t got = preadv(fd, parts, (int)count, (off_t)(offset + done * stride));
        if (got < asked) return done + (got < size ? 0 : (got - size) / stride + 1);
        done += rows;
    }
    return done;
}
