/* Compiled forms of the functions in array_kernels.py, which has their documentation and is used where this module is
 * missing. Both change the same arrays in the same way (tests/cache/test_kernels.py).
 *
 * Only the stable ABI of Python 3.11 is used, and no header of numpy: one build serves every later version. Arrays come
 * as buffers. A row, slab or place outside of its column raises IndexError, as with numpy; nothing is written then
 * beyond what came before it.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define FREE 0
#define RESERVED 1
#define EVICTABLE 3
#define QUARANTINED 4
#define STATES 5
#define AHEAD 8 /* rows whose memory is prefetched while others are worked on */

#define NOT_CUT -1
#define NOT_A_SLOT -2
#define WRONG_STATE -3
#define TWICE -4

/* ---- arguments ------------------------------------------------------------------------------------------------ */

typedef struct {
    Py_buffer views[10];
    int count;
} Buffers;

static void release(Buffers *held) {
    while (held->count)
        PyBuffer_Release(&held->views[--held->count]);
}

static Py_buffer *take(Buffers *held, PyObject *array, Py_ssize_t itemsize, int flags) {
    Py_buffer *view = &held->views[held->count];
    if (PyObject_GetBuffer(array, view, flags))
        return NULL;
    held->count++;
    if (view->itemsize != itemsize) {
        PyErr_Format(PyExc_TypeError, "an array has items of %zd bytes; they must have %zd", view->itemsize, itemsize);
        return NULL;
    }
    return view;
}

/* A contiguous array; `length` becomes its number of items. NULL with an exception if it is none. */
static void *column(Buffers *held, PyObject *array, Py_ssize_t itemsize, int writable, Py_ssize_t *length) {
    Py_buffer *view = take(held, array, itemsize, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (!view)
        return NULL;
    if (length)
        *length = view->len / itemsize;
    return view->buf;
}

/* An array of int64 with one dimension, whatever its stride. */
typedef struct {
    const char *data;
    Py_ssize_t length, stride;
} Rows;

static int rows_of(Buffers *held, PyObject *array, Rows *rows) {
    Py_buffer *view = take(held, array, 8, PyBUF_STRIDES);
    if (!view)
        return -1;
    if (view->ndim != 1) {
        PyErr_SetString(PyExc_TypeError, "rows and slots have one dimension");
        return -1;
    }
    rows->data = view->buf, rows->length = view->shape[0], rows->stride = view->strides[0];
    return 0;
}

static inline int64_t row_at(const Rows *rows, Py_ssize_t i) {
    return *(const int64_t *)(rows->data + i * rows->stride);
}

static int wrong_count(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments were given; there are %zd", given, wanted);
    return 1;
}

static int too_short(Py_ssize_t length, Py_ssize_t least) {
    if (length >= least)
        return 0;
    PyErr_Format(PyExc_IndexError, "an array has %zd items; at least %zd are needed", length, least);
    return 1;
}

static void outside(int64_t index) {
    PyErr_Format(PyExc_IndexError, "index %lld is out of bounds", (long long)index);
}

/* Append an item to a list, which takes it over; an item that is NULL has raised. */
static int append(PyObject *list, PyObject *item) {
    int failed = !item || PyList_Append(list, item);
    Py_XDECREF(item);
    return failed;
}

#define ARGUMENTS(wanted)                                                                                              \
    Buffers held = {.count = 0};                                                                                       \
    PyObject *answer = NULL;                                                                                           \
    if (wrong_count(nargs, wanted))                                                                                    \
        return NULL;
#define COLUMN(type, name, i, writable, length)                                                                        \
    type *name = column(&held, args[i], sizeof(type), writable, length);                                               \
    if (!name)                                                                                                         \
        goto done;
#define ROWS(name, i)                                                                                                  \
    Rows name;                                                                                                         \
    if (rows_of(&held, args[i], &name))                                                                                \
        goto done;
#define ROW(name, rows, i, capacity)                                                                                   \
    int64_t name = row_at(&rows, i);                                                                                   \
    if (name < 0 || name >= capacity) {                                                                                \
        outside(name);                                                                                                 \
        goto done;                                                                                                     \
    }
#define NUMBER(name, i)                                                                                                \
    long long name = PyLong_AsLongLong(args[i]);                                                                       \
    if (name == -1 && PyErr_Occurred())                                                                                \
        goto done;
#define FUNCTION(name) static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
#define DONE                                                                                                           \
    done:                                                                                                              \
    release(&held);                                                                                                    \
    return answer;

/* ---- the index of hashes -------------------------------------------------------------------------------------- */

FUNCTION(tag_hashes) {
    ARGUMENTS(4)
    Py_ssize_t halves, factors, count;
    COLUMN(uint64_t, whole, 0, 0, &halves)
    COLUMN(uint64_t, multipliers, 1, 0, &factors)
    uint64_t addend = PyLong_AsUnsignedLongLong(args[2]);
    if (addend == (uint64_t)-1 && PyErr_Occurred())
        goto done;
    COLUMN(uint32_t, tags, 3, 1, &count)
    const uint32_t *words = (const uint32_t *)whole; /* as they lie in memory */
    if (too_short(2 * halves, count * factors))
        goto done;
    for (Py_ssize_t i = 0; i < count; i++, words += factors) {
        uint64_t sum = addend;
        for (Py_ssize_t k = 0; k < factors; k++)
            sum += multipliers[k] * words[k];
        tags[i] = (uint32_t)(sum >> 32) | UINT32_C(1) << 31;
    }
    answer = Py_NewRef(Py_None);
    DONE
}

/* The lanes of an index, in the order in which they are arguments. */
typedef struct {
    uint32_t *tags;
    int32_t *rows;
    long long level, buckets;
} Table;

static int table_of(Buffers *held, PyObject *const *args, int writable, Table *table) {
    Py_ssize_t tags, rows;
    if (!(table->tags = column(held, args[0], 4, writable, &tags)) ||
        !(table->rows = column(held, args[1], 4, writable, &rows)))
        return -1;
    table->level = PyLong_AsLongLong(args[2]);
    table->buckets = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred())
        return -1;
    if (table->level < 0 || table->level > 31 || table->buckets < 1LL << table->level) {
        PyErr_SetString(PyExc_IndexError, "the table has fewer buckets than its level");
        return -1;
    }
    return too_short(tags, table->buckets * LANES) || too_short(rows, table->buckets * LANES) ? -1 : 0;
}

/* The first lane of the bucket of a tag. */
static inline Py_ssize_t lane_of(const Table *table, uint32_t tag) {
    long long bucket = tag & ((UINT64_C(2) << table->level) - 1);
    return (Py_ssize_t)(bucket < table->buckets ? bucket : bucket - (1LL << table->level)) * LANES;
}

FUNCTION(find_rows) {
    ARGUMENTS(8)
    Py_ssize_t capacity, length, count, room, matches = 0;
    Table table;
    if (table_of(&held, args, 0, &table))
        goto done;
    COLUMN(uint64_t, table_words, 4, 0, &capacity)
    COLUMN(uint64_t, words, 5, 0, &length)
    COLUMN(uint32_t, tags, 6, 0, &count)
    COLUMN(int64_t, found, 7, 1, &room)
    Py_ssize_t width = count ? length / count : 1;
    if (too_short(room, count) || too_short(width, 1))
        goto done;
    /* First the lanes of each tag, then the hashes of the rows in them: the cache misses of many rows overlap. */
    for (Py_ssize_t i = 0; i < count && i < AHEAD; i++)
        __builtin_prefetch(table.tags + lane_of(&table, tags[i]));
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(table.tags + lane_of(&table, tags[i + AHEAD]));
        Py_ssize_t lane = lane_of(&table, tags[i]), end = lane + LANES;
        while (lane < end && table.tags[lane] != tags[i])
            lane++;
        found[i] = lane < end ? lane : -1;
        if (lane < end)
            __builtin_prefetch(table_words + table.rows[lane] * width);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (found[i] < 0)
            continue;
        Py_ssize_t lane = found[i], end = lane_of(&table, tags[i]) + LANES;
        found[i] = -1;
        for (; lane < end; lane++) {
            if (table.tags[lane] != tags[i])
                continue;
            int64_t row = table.rows[lane];
            if (row < 0 || (row + 1) * width > capacity) {
                outside(row);
                goto done;
            }
            if (!memcmp(table_words + row * width, words + i * width, width * 8)) {
                found[i] = row;
                matches++;
                break;
            }
        }
    }
    answer = PyLong_FromSsize_t(matches);
    DONE
}

FUNCTION(place_rows) {
    ARGUMENTS(7)
    Py_ssize_t count, room, left = 0;
    Table table;
    if (table_of(&held, args, 1, &table))
        goto done;
    COLUMN(uint32_t, tags, 4, 0, &count)
    ROWS(rows, 5)
    COLUMN(int64_t, over, 6, 1, &room)
    if (too_short(room, count) || too_short(rows.length, count))
        goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(table.tags + lane_of(&table, tags[i + AHEAD]), 1);
        Py_ssize_t lane = lane_of(&table, tags[i]), end = lane + LANES;
        while (lane < end && table.tags[lane])
            lane++;
        if (lane == end) {
            over[left++] = i;
            continue;
        }
        table.tags[lane] = tags[i];
        table.rows[lane] = (int32_t)row_at(&rows, i);
    }
    answer = PyLong_FromSsize_t(left);
    DONE
}

FUNCTION(unplace_rows) {
    ARGUMENTS(7)
    Py_ssize_t count, room, left = 0;
    Table table;
    if (table_of(&held, args, 1, &table))
        goto done;
    COLUMN(uint32_t, tags, 4, 0, &count)
    ROWS(rows, 5)
    COLUMN(int64_t, over, 6, 1, &room)
    if (too_short(room, count) || too_short(rows.length, count))
        goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(table.tags + lane_of(&table, tags[i + AHEAD]), 1);
        Py_ssize_t lane = lane_of(&table, tags[i]), end = lane + LANES;
        while (lane < end && (table.tags[lane] != tags[i] || table.rows[lane] != row_at(&rows, i)))
            lane++;
        if (lane == end)
            over[left++] = i;
        else
            table.tags[lane] = 0;
    }
    answer = PyLong_FromSsize_t(left);
    DONE
}

/* ---- the order of uses ---------------------------------------------------------------------------------------- */

FUNCTION(enter_log) {
    ARGUMENTS(5)
    Py_ssize_t capacity, room;
    COLUMN(int64_t, places, 0, 1, &capacity)
    COLUMN(int32_t, log, 1, 1, &room)
    ROWS(rows, 2)
    NUMBER(start, 3)
    NUMBER(number, 4)
    if (start < 0)
        outside(start);
    if (start < 0 || too_short(room, start + rows.length))
        goto done;
    for (Py_ssize_t i = 0; i < rows.length; i++) {
        ROW(row, rows, i, capacity)
        log[start + i] = (int32_t)row;
        places[row] = number + i;
    }
    answer = Py_NewRef(Py_None);
    DONE
}

FUNCTION(leave_log) {
    ARGUMENTS(3)
    Py_ssize_t capacity;
    PyObject *runs = NULL;
    COLUMN(int64_t, places, 0, 1, &capacity)
    ROWS(rows, 1)
    NUMBER(bits, 2)
    if (!(runs = PyList_New(0)))
        goto done;
    for (Py_ssize_t i = 0; i < rows.length;) {
        long long segment = 0, count = 0;
        for (; i < rows.length; i++, count++) {
            ROW(row, rows, i, capacity)
            long long of_row = (places[row] - 1) >> bits;
            if (count && of_row != segment)
                break;
            segment = of_row;
            places[row] = 0;
        }
        if (append(runs, Py_BuildValue("(LL)", segment, count)))
            goto done;
    }
    answer = Py_NewRef(runs);
done:
    Py_XDECREF(runs);
    release(&held);
    return answer;
}

/* ---- the columns of blocks ------------------------------------------------------------------------------------ */

FUNCTION(readable_rows) {
    ARGUMENTS(3)
    Py_ssize_t capacity, room, count = 0;
    COLUMN(int32_t, missing, 0, 0, &capacity)
    ROWS(rows, 1)
    COLUMN(char, flags, 2, 1, &room)
    if (too_short(room, rows.length))
        goto done;
    for (Py_ssize_t i = 0; i < rows.length; i++) {
        int64_t row = row_at(&rows, i);
        if (row >= capacity) {
            outside(row);
            goto done;
        }
        flags[i] = row >= 0 && !missing[row];
        count += flags[i];
    }
    answer = PyLong_FromSsize_t(count);
    DONE
}

FUNCTION(add_refs) {
    ARGUMENTS(4)
    Py_ssize_t capacity, flags, room, count = 0;
    COLUMN(int32_t, refs, 0, 1, &capacity)
    COLUMN(char, evictable, 1, 1, &flags)
    ROWS(rows, 2)
    COLUMN(int64_t, idle, 3, 1, &room)
    if (too_short(flags, capacity) || too_short(room, rows.length))
        goto done;
    for (Py_ssize_t i = 0; i < rows.length; i++) {
        ROW(row, rows, i, capacity)
        refs[row]++;
        if (evictable[row]) {
            evictable[row] = 0;
            idle[count++] = row;
        }
    }
    answer = PyLong_FromSsize_t(count);
    DONE
}

FUNCTION(drop_refs) {
    ARGUMENTS(6)
    Py_ssize_t capacity, flags, sealable, room, count = 0, going = 0;
    COLUMN(int32_t, refs, 0, 1, &capacity)
    COLUMN(char, detached, 1, 0, &flags)
    COLUMN(int32_t, missing, 2, 0, &sealable)
    NUMBER(shards, 3)
    ROWS(rows, 4)
    COLUMN(int64_t, idle, 5, 1, &room)
    if (too_short(flags, capacity) || too_short(sealable, capacity) || too_short(room, rows.length))
        goto done;
    for (Py_ssize_t i = rows.length; i--;) {
        ROW(row, rows, i, capacity)
        if (!--refs[row]) {
            idle[count++] = row;
            going += detached[row] || missing[row] == shards;
        }
    }
    answer = Py_BuildValue("(nn)", count, going);
    DONE
}

FUNCTION(sealed_slots) {
    ARGUMENTS(4)
    Py_ssize_t cells, room, count = 0;
    COLUMN(int64_t, slots, 0, 0, &cells)
    NUMBER(shards, 1)
    ROWS(rows, 2)
    COLUMN(int64_t, sealed, 3, 1, &room)
    if (shards <= 0 || too_short(room, rows.length * shards))
        goto done;
    Py_ssize_t capacity = cells / shards;
    for (long long shard = 0; shard < shards; shard++, slots += capacity)
        for (Py_ssize_t i = 0; i < rows.length; i++) {
            ROW(row, rows, i, capacity)
            if (slots[row] >= 0)
                sealed[count++] = slots[row];
        }
    answer = PyLong_FromSsize_t(count);
    DONE
}

/* ---- the states of slots -------------------------------------------------------------------------------------- */

/* The columns of a pool's slabs, in the order in which they are arguments from the second one on. */
typedef struct {
    long long unit;
    const int32_t *at;
    const int64_t *sizes, *starts, *firsts;
    int64_t *evictable;
    uint8_t *states;
    Py_ssize_t units, slabs, places;
} Pool;

static int pool_of(Buffers *held, PyObject *const *args, Pool *pool) {
    pool->unit = PyLong_AsLongLong(args[0]);
    if (pool->unit <= 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a unit has some bytes");
        return -1;
    }
    Py_ssize_t starts, firsts, evictable;
    if (!(pool->at = column(held, args[1], 4, 0, &pool->units)) ||
        !(pool->sizes = column(held, args[2], 8, 0, &pool->slabs)) ||
        !(pool->starts = column(held, args[3], 8, 0, &starts)) ||
        !(pool->firsts = column(held, args[4], 8, 0, &firsts)) ||
        !(pool->evictable = column(held, args[5], 8, 1, &evictable)) ||
        !(pool->states = column(held, args[6], 1, 1, &pool->places)))
        return -1;
    return too_short(starts, pool->slabs) || too_short(firsts, pool->slabs) || too_short(evictable, pool->slabs) ? -1 : 0;
}

/* The slab of a slot, and its place in the column of states; or one of the codes of what is wrong with it. */
static inline long long locate(const Pool *pool, int64_t slot, Py_ssize_t *place) {
    long long unit = slot / pool->unit;
    if (slot < 0 || unit >= pool->units)
        return NOT_A_SLOT;
    long long slab = pool->at[unit];
    if (slab < 0 || slab >= pool->slabs)
        return NOT_A_SLOT;
    int64_t size = pool->sizes[slab];
    if (!size)
        return NOT_CUT;
    int64_t offset = slot - pool->starts[slab], inside = offset / size;
    if (inside * size != offset)
        return NOT_A_SLOT;
    *place = (Py_ssize_t)(pool->firsts[slab] + inside);
    return *place < 0 || *place >= pool->places ? NOT_A_SLOT : slab;
}

FUNCTION(move_slots) {
    ARGUMENTS(12)
    Py_ssize_t touches, place;
    long long nbytes = 0, slab;
    Pool pool;
    ROWS(slots, 0)
    if (pool_of(&held, args + 1, &pool))
        goto done;
    NUMBER(source, 8)
    NUMBER(target, 9)
    COLUMN(int64_t, touched, 10, 1, &touches)
    NUMBER(tick, 11)
    if (too_short(touches, pool.slabs))
        goto done;
    for (Py_ssize_t i = 0; i < slots.length; i++) {
        if ((slab = locate(&pool, row_at(&slots, i), &place)) < 0)
            nbytes = slab;
        else if (pool.states[place] != source)
            nbytes = WRONG_STATE;
        if (nbytes < 0) {
            answer = PyLong_FromLongLong(nbytes);
            goto done;
        }
    }
    for (Py_ssize_t i = 0; i < slots.length; i++) {
        slab = locate(&pool, row_at(&slots, i), &place);
        pool.states[place] = (uint8_t)target;
        nbytes += pool.sizes[slab];
        pool.evictable[slab] += (target == EVICTABLE) - (source == EVICTABLE);
        if (tick >= 0)
            touched[slab] = tick;
    }
    answer = PyLong_FromLongLong(nbytes);
    DONE
}

FUNCTION(free_slots) {
    ARGUMENTS(10)
    Py_ssize_t place, owned;
    long long nbytes[STATES] = {0}, slab;
    Pool pool;
    PyObject *runs = NULL;
    ROWS(slots, 0)
    if (pool_of(&held, args + 1, &pool))
        goto done;
    COLUMN(int64_t, owners, 8, 1, &owned)
    NUMBER(nobody, 9)
    if (too_short(owned, pool.places))
        goto done;
    for (Py_ssize_t i = 0; i < slots.length; i++) {
        long long code = locate(&pool, row_at(&slots, i), &place);
        if (i && row_at(&slots, i - 1) >= row_at(&slots, i))
            code = TWICE;
        if (code >= 0 && (pool.states[place] == FREE || pool.states[place] >= QUARANTINED))
            code = WRONG_STATE;
        if (code < 0) {
            answer = Py_BuildValue("(L[][])", code);
            goto done;
        }
    }
    if (!(runs = PyList_New(0)))
        goto done;
    for (Py_ssize_t i = 0; i < slots.length;) {
        long long of_run = -1, count = 0, lowest = 0;
        for (; i < slots.length; i++, count++) {
            slab = locate(&pool, row_at(&slots, i), &place);
            if (count && slab != of_run)
                break;
            if (!count)
                lowest = place - pool.firsts[slab];
            of_run = slab;
            nbytes[pool.states[place]] += pool.sizes[slab];
            pool.evictable[slab] -= pool.states[place] == EVICTABLE;
            pool.states[place] = FREE;
            owners[place] = nobody;
        }
        if (append(runs, Py_BuildValue("(LLL)", of_run, count, lowest)))
            goto done;
    }
    answer = Py_BuildValue("(i[LLLLL]O)", 0, nbytes[0], nbytes[1], nbytes[2], nbytes[3], nbytes[4], runs);
done:
    Py_XDECREF(runs);
    release(&held);
    return answer;
}

FUNCTION(reserve_free) {
    ARGUMENTS(6)
    Py_ssize_t places, room, count = 0;
    COLUMN(uint8_t, states, 0, 1, &places)
    NUMBER(first, 1)
    NUMBER(capacity, 2)
    NUMBER(lowest, 3)
    NUMBER(wanted, 4)
    COLUMN(int64_t, indices, 5, 1, &room)
    if (first < 0 || lowest < 0)
        outside(first < 0 ? first : lowest);
    if (first < 0 || lowest < 0 || too_short(places, first + capacity) || too_short(room, wanted))
        goto done;
    for (long long at = lowest; count < wanted && at < capacity; at++) {
        uint8_t *next = memchr(states + first + at, FREE, (size_t)(capacity - at));
        if (!next)
            break;
        *next = RESERVED;
        at = next - (states + first);
        indices[count++] = at;
    }
    answer = PyLong_FromSsize_t(count);
    DONE
}

/* ---- the module ----------------------------------------------------------------------------------------------- */

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(tag_hashes),    METHOD(find_rows),  METHOD(place_rows), METHOD(unplace_rows), METHOD(enter_log),
    METHOD(leave_log),     METHOD(add_refs),   METHOD(drop_refs),  METHOD(readable_rows), METHOD(sealed_slots),
    METHOD(move_slots),    METHOD(free_slots), METHOD(reserve_free), {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    return PyModuleDef_Init(&definition);
}
