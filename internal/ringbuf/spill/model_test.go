// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// modelLane is a plain queue.
type modelLane struct {
	name   string
	all    []string // every message whose Put was confirmed
	head   int      // committed
	synced int      // of these, at least so many for good
	lane   *Lane[string]
	lease  Lease[string]
	leased bool

	reader *Reader[string] // nil, or what has the lane leased
	read   int             // of what is held, by it
}

func (l *modelLane) held() []string { return l.all[l.head:] }

// The spill must do what slices would do, through restarts and crashes: what was confirmed
// comes out once, in the order of its lane; after a crash some of what was committed and not
// flushed may come again.
func TestModel(t *testing.T) {
	dir := fastTemp(t)
	rapid.Check(t, func(t *rapid.T) { checkModel(t, dir) })
}

func checkModel(t *rapid.T, dir string) {
	root, err := os.MkdirTemp(dir, "run")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	}()
	cfg := Config{
		Dir:             filepath.Join(root, "0"),
		MaxCount:        rapid.SampledFrom([]int{3, 50, 1000}).Draw(t, "count"),
		MaxBytes:        rapid.SampledFrom([]int64{leastRoom, 1 << 20}).Draw(t, "bytes"),
		LaneShare:       rapid.SampledFrom([]float64{0, 0.5}).Draw(t, "share"),
		BatchCount:      rapid.SampledFrom([]int{1, 7, 0}).Draw(t, "batch"),
		CheckpointCount: 1 << 20, CheckpointDelay: time.Minute, // only when asked to, so that a copy is of one instant
	}
	var s *Spill[string]
	lanes := []*modelLane{{name: "a"}, {name: "b"}, {name: strings.Repeat("c", MaxName)}}
	start := func(t *rapid.T) {
		var rec Recovery
		var err error
		if s, rec, err = Open(cfg, text{}); err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, l := range lanes {
			*l = modelLane{name: l.name, all: l.all, head: l.head, synced: l.synced, lane: s.Lane(l.name)}
			count := l.lane.Len()
			n += count
			if head := len(l.all) - count; head < l.synced || head > l.head {
				t.Fatalf("lane %.5s: begins at %d, want %d to %d of %d", l.name, head, l.synced, l.head, len(l.all))
			} else {
				l.head = head
			}
		}
		if len(rec.Damaged) > 0 || rec.SetAside != nil || rec.Messages != n {
			t.Fatalf("%d messages, %+v", n, rec)
		}
	}
	start(t)
	defer func() { s.Close() }()
	seq := 0
	draw := func(t *rapid.T) *modelLane { return rapid.SampledFrom(lanes).Draw(t, "lane") }
	crash := 0
	t.Repeat(map[string]func(*rapid.T){
		"TryPut": func(t *rapid.T) {
			l := draw(t)
			n := rapid.SampledFrom([]int{1, 1, 2, 9, 60}).Draw(t, "n")
			vs := numbered(seq, seq+n, rapid.SampledFrom([]int{0, 10, 300, 5000}).Draw(t, "size"))
			seq += n
			k, err := l.lane.TryPut(vs...)
			l.all = append(l.all, vs[:k]...)
			st := s.Stats()
			if err != nil && !errors.Is(err, ringbuf.ErrFull) || (k == n) != (err == nil) {
				t.Fatalf("TryPut of %d: %d, %v", n, k, err)
			}
			share := cfg.LaneShare
			if share == 0 {
				share = 1
			}
			ls := l.lane.Stats()
			if err != nil && st.Bytes+5600 < cfg.MaxBytes && st.Count+st.Drained < int(share*float64(cfg.MaxCount)) &&
				ls.Count < int(share*float64(cfg.MaxCount)) && ls.Bytes+5500 < int64(share*float64(cfg.MaxBytes)) {
				t.Fatalf("refused with %+v", st)
			}
			if st.Count > cfg.MaxCount || st.Bytes > cfg.MaxBytes {
				t.Fatalf("over the bounds: %+v", st)
			}
		},
		"TryLease": func(t *rapid.T) {
			l := draw(t)
			dst := make([]string, rapid.SampledFrom([]int{1, 2, 30}).Draw(t, "len"))
			lease, err := l.lane.TryLease(dst)
			switch {
			case l.leased:
				if !errors.Is(err, ringbuf.ErrLeased) {
					t.Fatal(err)
				}
			case len(l.held()) == 0:
				if !errors.Is(err, ringbuf.ErrEmpty) {
					t.Fatal(err)
				}
			default:
				want := l.held()[:min(len(dst), len(l.held()))]
				if err != nil || !slices.Equal(dst[:lease.Len()], want) {
					t.Fatalf("%q, %v; want %q", dst[:lease.Len()], err, want)
				}
				l.lease, l.leased = lease, true
			}
		},
		"Commit": func(t *rapid.T) {
			l := draw(t)
			if l.reader != nil {
				return
			}
			n := rapid.IntRange(-1, l.lease.Len()+1).Draw(t, "n")
			err := l.lease.Commit(n)
			switch {
			case l.lease.Len() > 0 && (n < 0 || n > l.lease.Len()):
				if err == nil || errors.Is(err, ringbuf.ErrLeaseOver) {
					t.Fatal(err)
				}
			case !l.leased:
				if !errors.Is(err, ringbuf.ErrLeaseOver) {
					t.Fatalf("commit of no lease: %v", err)
				}
			case err != nil:
				t.Fatal(err)
			default:
				l.head, l.leased = l.head+n, false
			}
		},
		"Reader": func(t *rapid.T) {
			l := draw(t)
			r, err := l.lane.Reader()
			switch {
			case l.leased:
				if !errors.Is(err, ringbuf.ErrLeased) {
					t.Fatal(err)
				}
			case err != nil:
				t.Fatal(err)
			default:
				l.reader, l.read, l.leased, l.lease = r, 0, true, Lease[string]{}
			}
		},
		"Read": func(t *rapid.T) {
			l := draw(t)
			if l.reader == nil {
				return
			}
			dst := make([]string, rapid.SampledFrom([]int{1, 2, 30}).Draw(t, "len"))
			limit := rapid.SampledFrom([]int64{1, 20, 1000, math.MaxInt64}).Draw(t, "limit")
			n, err := l.reader.Read(dst, limit)
			want := l.held()[l.read:]
			want = want[:min(len(dst), len(want))]
			for i, m := range want {
				if limit -= int64(len(m)); limit <= 0 {
					want = want[:i+1]
					break
				}
			}
			if err != nil || !slices.Equal(dst[:n], want) {
				t.Fatalf("%q, %v; want %q", dst[:n], err, want)
			}
			l.read += n
		},
		"GiveUp": func(t *rapid.T) {
			l := draw(t)
			if l.reader == nil {
				return
			}
			n := rapid.IntRange(-1, l.read+1).Draw(t, "n")
			switch err := l.reader.Commit(n); {
			case n < 0 || n > l.read:
				if err == nil || errors.Is(err, ringbuf.ErrLeaseOver) {
					t.Fatal(err)
				}
			case err != nil:
				t.Fatal(err)
			default:
				l.head, l.read = l.head+n, l.read-n
			}
		},
		"CloseReader": func(t *rapid.T) {
			l := draw(t)
			if l.reader == nil {
				return
			}
			l.reader.Close()
			if err := l.reader.Commit(0); !errors.Is(err, ringbuf.ErrLeaseOver) {
				t.Fatalf("a reader that is closed: %v", err)
			}
			l.reader, l.leased = nil, false
		},
		"Flush": func(t *rapid.T) {
			if err := s.Flush(context.Background()); err != nil {
				t.Fatal(err)
			}
			for _, l := range lanes {
				l.synced = l.head
			}
			if st := s.Stats(); st.Drained != 0 {
				t.Fatalf("after a flush: %+v", st)
			}
		},
		"Restart": func(t *rapid.T) {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			for _, l := range lanes {
				l.synced = l.head
			}
			start(t)
		},
		"Crash": func(t *rapid.T) {
			crash++
			data, err := os.ReadFile(filepath.Join(cfg.Dir, fileName))
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			cfg.Dir = filepath.Join(root, strings.Repeat("x", crash))
			if err := errors.Join(os.Mkdir(cfg.Dir, 0o700), os.WriteFile(filepath.Join(cfg.Dir, fileName), data, 0o600)); err != nil {
				t.Fatal(err)
			}
			start(t)
		},
		"": func(t *rapid.T) {
			n := 0
			for _, l := range lanes {
				n += len(l.held())
				if l.lane.Len() != len(l.held()) || l.lane.Stats().Empty() != (len(l.held()) == 0) {
					t.Fatalf("lane %.5s: %d, want %d", l.name, l.lane.Len(), len(l.held()))
				}
			}
			if st := s.Stats(); st.Count != n || st.State != Ready || st.Pending != 0 {
				t.Fatalf("%+v, want %d messages", st, n)
			}
		},
	})
}
