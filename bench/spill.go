// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/raft"
	raftwal "github.com/hashicorp/raft-wal"
	"go.etcd.io/bbolt"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
	"github.com/stormguard-mq/stormguard/internal/ringbuf/spill"
)

// durable is the hold on disk beside the stores that people build one on.
var durable = newDurable(1 << 17)

// drainBatch is how many messages are leased, committed and synced at a time.
const drainBatch = 256

// newDurable drains so many messages in a turn.
func newDurable(drained int) Group {
	g := Group{
		Name:  "spill",
		About: "the durable hold: an operation is a batch that is synced; drains: a message",
	}
	for _, size := range []struct {
		name  string
		bytes int
	}{{"256b", 256}, {"1k", 1 << 10}} {
		for _, batch := range []int{1, 32, 256} {
			what := fmt.Sprintf("%s_%d", size.name, batch)
			open := func(name string, open func(string) (log, error)) {
				g.Cases = append(g.Cases, Case{Name: name + "_" + what, Open: openAppend(open, size.bytes, batch)})
			}
			open("spill", openSpill)
			open("bbolt", openBolt)
			open("raftwal", openRaftWAL)
			open("pebble", openPebble)
			for _, rival := range []string{"bbolt", "raftwal", "pebble"} {
				g.Ratios = append(g.Ratios, Ratio{Name: rival + "_" + what, Kind: Throughput, Ours: "spill_" + what, Theirs: rival + "_" + what})
			}
		}
		g.Cases = append(g.Cases,
			Case{Name: "drain_" + size.name, Open: openDrain(openSpill, size.bytes), N: drained},
			Case{Name: "drain_bbolt_" + size.name, Open: openDrain(openBolt, size.bytes), N: drained})
		g.Ratios = append(g.Ratios,
			Ratio{Name: "drain_" + size.name, Kind: PerSecond, Ours: "drain_" + size.name},
			Ratio{Name: "drain_bbolt_" + size.name, Kind: Throughput, Ours: "drain_" + size.name, Theirs: "drain_bbolt_" + size.name})
	}
	return g
}

// A log keeps messages on disk, in order.
type log interface {
	append(vs [][]byte) error // durable when it returns
	drain(n int) (int, error) // reads up to n of the oldest, and forgets them, durably
	close() error
}

// openAppend syncs one batch after the other, and empties the log between its turns.
func openAppend(open func(string) (log, error), size, batch int) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		dir, err := os.MkdirTemp("", "bench-spill")
		if err != nil {
			return Runner{}, err
		}
		l, err := open(filepath.Join(dir, "log"))
		if err != nil {
			return Runner{}, errors.Join(err, os.RemoveAll(dir))
		}
		vs := messages(size, batch)
		return Runner{
			Do: func(_ context.Context, n int) error {
				for range n {
					if err := l.append(vs); err != nil {
						return err
					}
				}
				return nil
			},
			After: func(context.Context) error { return empty(l) },
			Close: func() error { return errors.Join(l.close(), os.RemoveAll(dir)) },
		}, nil
	}
}

// openDrain empties a log that was filled before.
func openDrain(open func(string) (log, error), size int) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		dir, err := os.MkdirTemp("", "bench-spill")
		if err != nil {
			return Runner{}, err
		}
		l, err := open(filepath.Join(dir, "log"))
		if err != nil {
			return Runner{}, errors.Join(err, os.RemoveAll(dir))
		}
		return Runner{
			Before: func(_ context.Context, n int) error {
				for ; n > 0; n -= 1024 {
					if err := l.append(messages(size, min(n, 1024))); err != nil {
						return err
					}
				}
				return nil
			},
			Do: func(_ context.Context, n int) error {
				for n > 0 {
					k, err := l.drain(drainBatch)
					if err == nil && k == 0 {
						err = fmt.Errorf("%d messages are missing", n)
					}
					if err != nil {
						return err
					}
					n -= k
				}
				return nil
			},
			Close: func() error { return errors.Join(l.close(), os.RemoveAll(dir)) },
		}, nil
	}
}

func messages(size, n int) [][]byte {
	vs := make([][]byte, n)
	for i := range vs {
		vs[i] = make([]byte, size)
		for k := range vs[i] {
			vs[i][k] = byte(i * k)
		}
	}
	return vs
}

func empty(l log) error {
	for {
		if n, err := l.drain(8192); n == 0 || err != nil {
			return err
		}
	}
}

type spillLog struct {
	s    *spill.Spill[[]byte]
	lane *spill.Lane[[]byte]
	dst  [][]byte
}

type raw struct{}

func (raw) Append(dst, v []byte) []byte       { return append(dst, v...) }
func (raw) Decode(src []byte) ([]byte, error) { return src, nil }

func openSpill(dir string) (log, error) {
	s, _, err := spill.Open(spill.Config{Dir: dir}, raw{})
	if err != nil {
		return nil, err
	}
	return &spillLog{s: s, lane: s.Lane("orders/7"), dst: make([][]byte, 8192)}, nil
}

func (l *spillLog) append(vs [][]byte) error {
	_, err := l.lane.Put(context.Background(), vs...)
	return err
}

func (l *spillLog) drain(n int) (int, error) {
	lease, err := l.lane.TryLease(l.dst[:n])
	if errors.Is(err, ringbuf.ErrEmpty) {
		return 0, nil
	}
	if err == nil {
		err = lease.Commit(lease.Len())
	}
	if err == nil {
		err = l.s.Flush(context.Background())
	}
	return lease.Len(), err
}

func (l *spillLog) close() error { return l.s.Close() }

// boltLog is bbolt as one would use it for this, at its best: a key for each message, pages
// that are filled, no list of free pages. It checks and bounds nothing.
type boltLog struct {
	db   *bbolt.DB
	next uint64
}

func openBolt(path string) (log, error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return nil, err
	}
	return &boltLog{db: db}, db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket([]byte("log"))
		return err
	})
}

func (l *boltLog) append(vs [][]byte) error {
	return l.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte("log"))
		b.FillPercent = 0.95
		for _, v := range vs {
			l.next++
			if err := b.Put(binary.BigEndian.AppendUint64(nil, l.next), v); err != nil {
				return err
			}
		}
		return nil
	})
}

func (l *boltLog) drain(n int) (k int, err error) {
	return k, l.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket([]byte("log"))
		keys := make([][]byte, 0, n)
		c := b.Cursor()
		for key, v := c.First(); key != nil && len(keys) < n; key, v = c.Next() {
			keys = append(keys, key)
			sink = append(sink[:0], v...)
		}
		for _, key := range keys {
			if err := b.Delete(key); err != nil {
				return err
			}
		}
		k = len(keys)
		return nil
	})
}

var sink []byte

func (l *boltLog) close() error { return l.db.Close() }

type raftLog struct {
	w    *raftwal.WAL
	next uint64
	logs []*raft.Log
}

func openRaftWAL(dir string) (log, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	w, err := raftwal.Open(dir)
	return &raftLog{w: w}, err
}

func (l *raftLog) append(vs [][]byte) error {
	l.logs = l.logs[:0]
	for _, v := range vs {
		l.next++
		l.logs = append(l.logs, &raft.Log{Index: l.next, Data: v})
	}
	return l.w.StoreLogs(l.logs)
}

// drain forgets all but the last message, which raft-wal would not start without.
func (l *raftLog) drain(int) (int, error) {
	first, err := l.w.FirstIndex()
	if err != nil || first >= l.next {
		return 0, err
	}
	return int(l.next - first), l.w.DeleteRange(first, l.next-1)
}

func (l *raftLog) close() error { return l.w.Close() }

type pebbleLog struct {
	db          *pebble.DB
	first, next uint64
}

func openPebble(dir string) (log, error) {
	db, err := pebble.Open(dir, &pebble.Options{Logger: quiet{}})
	return &pebbleLog{db: db}, err
}

// quiet is a logger that says nothing but what ends the program.
type quiet struct{}

func (quiet) Infof(string, ...any)           {}
func (quiet) Errorf(string, ...any)          {}
func (quiet) Fatalf(format string, a ...any) { panic(fmt.Sprintf(format, a...)) }

func (l *pebbleLog) append(vs [][]byte) (err error) {
	b := l.db.NewBatch()
	defer func() { err = errors.Join(err, b.Close()) }()
	for _, v := range vs {
		l.next++
		if err := b.Set(binary.BigEndian.AppendUint64(nil, l.next), v, nil); err != nil {
			return err
		}
	}
	return b.Commit(pebble.Sync)
}

func (l *pebbleLog) drain(int) (int, error) {
	n := int(l.next - l.first)
	if n == 0 {
		return 0, nil
	}
	from, to := binary.BigEndian.AppendUint64(nil, l.first+1), binary.BigEndian.AppendUint64(nil, l.next+1)
	l.first = l.next
	return n, l.db.DeleteRange(from, to, pebble.Sync)
}

func (l *pebbleLog) close() error { return l.db.Close() }
