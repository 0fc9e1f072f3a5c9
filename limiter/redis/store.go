// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	_ "embed" // the script
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/stormguard-mq/stormguard/limiter"
)

//go:embed decide.lua
var decide string

// pause is how long nothing is asked after a question without a decision. Refusals have no pause,
// except for the prefetcher of the refused handle.
const pause = 100 * time.Millisecond

// sayEvery is how often a refusal is logged.
const sayEvery = time.Minute

// A Store holds limits at one Redis. It is safe for concurrent use. It has no goroutine of
// its own. Goroutines of its handles end by themselves, and Close waits for them.
type Store struct {
	client goredis.Scripter
	script *goredis.Script
	cfg    Config
	log    *slog.Logger
	start  time.Time // origin of quiet and says

	// silent says that Redis does not decide. Then nothing is asked until quiet, in time since
	// start. The first call after quiet sets a later quiet, and asks for all.
	silent atomic.Bool
	quiet  atomic.Int64
	last   atomic.Pointer[error] // why Redis does not decide; nil after an answer
	says   atomic.Int64          // when the next refusal may be logged, since start

	mu          sync.Mutex
	done        chan struct{} // closed by Close
	prefetchers sync.WaitGroup
}

// An Option supplies a collaborator that a config file cannot express.
type Option func(*Store)

// WithLogger logs when Redis falls silent, when it answers again, and when it refuses a
// question. log must not be nil. The default logs nothing.
func WithLogger(log *slog.Logger) Option { return func(s *Store) { s.log = log } }

// New makes a store at a Redis of version 5 or later. client is a client of go-redis:
// Client, ClusterClient or Ring. New refuses a client without ContextTimeoutEnabled: then a
// hanging Redis would hold callers for the client's ReadTimeout instead of Config.Timeout.
// The caller closes the client, after the Store. New does not talk to Redis.
func New(client goredis.Scripter, cfg Config, opts ...Option) (*Store, error) {
	err := cfg.Validate()
	switch c := client.(type) {
	case nil:
		err = errors.Join(err, fmt.Errorf("%w: client: nil is not a client", errConfig))
	case interface{ Options() *goredis.Options }:
		err = errors.Join(err, bounded(c.Options().ContextTimeoutEnabled))
	case interface {
		Options() *goredis.ClusterOptions
	}:
		err = errors.Join(err, bounded(c.Options().ContextTimeoutEnabled))
	case interface{ Options() *goredis.RingOptions }:
		err = errors.Join(err, bounded(c.Options().ContextTimeoutEnabled))
	}
	if err != nil {
		return nil, err
	}
	s := &Store{
		client: client, script: goredis.NewScript(decide), cfg: cfg.WithDefaults(),
		log: slog.New(slog.DiscardHandler), start: time.Now(), done: make(chan struct{}),
	}
	for _, o := range opts {
		o(s)
	}
	if s.log == nil {
		return nil, fmt.Errorf("%w: WithLogger: the logger must not be nil; leave the option out for silence", errConfig)
	}
	return s, nil
}

func bounded(byContext bool) error {
	if byContext {
		return nil
	}
	return fmt.Errorf("%w: client: ContextTimeoutEnabled: false is not in {true}: Timeout would not bound an answer", errConfig)
}

// Key makes a handle of a key. Each call makes a new handle with its own tokens and its own
// line of waiters: keep the handle if you use Admit or Wait. Key does not fail: if the key is
// empty or longer than [limiter.MaxKey], the handle denies everything.
func (s *Store) Key(key string) *Handle {
	l := s.cfg.limit(key)
	return &Handle{
		store: s, limit: l, valid: validKey(key), keys: []string{s.cfg.Prefix + "{" + key + "}"},
		batch: min(s.cfg.Batch, max(1, l.Burst/4)), turn: make(chan struct{}, 1),
	}
}

// Err returns why Redis does not decide at the moment, or nil. It does not ask Redis.
func (s *Store) Err() error {
	if p := s.last.Load(); p != nil {
		return *p
	}
	return nil
}

// Close denies everything from now on, and ends waits with [limiter.ErrClosed]. It returns
// when all goroutines of handles have ended, after about Config.Timeout at most. Tokens taken
// ahead are lost. It may be called again.
func (s *Store) Close() {
	s.mu.Lock()
	if !s.isClosed() {
		close(s.done)
	}
	s.mu.Unlock()
	s.prefetchers.Wait()
}

// run starts a goroutine, unless the store is closed.
func (s *Store) run(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed() {
		return false
	}
	s.prefetchers.Go(f)
	return true
}

func (s *Store) isClosed() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// An answer is the result of the script.
type answer struct {
	took int           // tokens taken
	wait time.Duration // time until there can be the least tokens asked for; 0 if some were taken
	left int           // tokens left in the bucket
}

// ask runs the script. It asks for least to most tokens, and gives back tokens back to the
// bucket. The error is ErrSilent or limiter.ErrClosed.
func (s *Store) ask(h *Handle, least, most, back int) (a answer, err error) {
	if s.isClosed() {
		return a, limiter.ErrClosed
	}
	now := time.Since(s.start)
	if s.silent.Load() {
		until := s.quiet.Load()
		if int64(now) < until || !s.quiet.CompareAndSwap(until, int64(now+s.cfg.Timeout)) {
			return a, s.unheard()
		}
	}
	within, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout)
	defer cancel()
	values, err := s.script.Run(within, s.client, h.keys, h.limit.Rate, h.limit.Burst, least, most, back).Int64Slice()
	if err == nil && len(values) != 3 {
		err = fmt.Errorf("an answer of %d values", len(values))
	}
	if err == nil {
		s.heard()
		return answer{int(values[0]), time.Duration(min(values[1], math.MaxInt64/1000)) * time.Microsecond, int(values[2])}, nil
	}
	return a, s.failed(err)
}

// heard notes an answer.
func (s *Store) heard() {
	if s.silent.Load() && s.silent.Swap(false) {
		s.log.Info("limit store answers again")
	}
	if s.last.Load() != nil {
		s.last.Store(nil)
	}
}

// failed notes a question without a decision. Only silence stops questions: a server that
// refuses one key may answer for others.
func (s *Store) failed(err error) error {
	if refused(err) {
		s.heard()
		err = fmt.Errorf("%w: %w: %w", ErrSilent, errRefused, err)
		s.last.Store(&err)
		now := time.Since(s.start)
		if at := s.says.Load(); now >= time.Duration(at) && s.says.CompareAndSwap(at, int64(now+sayEvery)) {
			s.log.Warn("limit store refuses", slog.Any("error", err), slog.String("until_then", s.cfg.Silence.String()))
		}
		return err
	}
	err = fmt.Errorf("%w: %w", ErrSilent, err)
	s.last.Store(&err)
	s.quiet.Store(int64(time.Since(s.start) + pause))
	if !s.silent.Swap(true) {
		s.log.Warn("limit store does not answer", slog.Any("error", err), slog.String("until_then", s.cfg.Silence.String()))
	}
	return err
}

func (s *Store) unheard() error {
	if err := s.Err(); err != nil {
		return err
	}
	return ErrSilent
}

// gaveUp returns the error of a wait whose context has ended.
func (s *Store) gaveUp(ctx context.Context) error {
	if s.silent.Load() {
		return fmt.Errorf("%w: %w", s.unheard(), ctx.Err())
	}
	return ctx.Err()
}

// rest returns how long from now nothing is asked; 0 if a question may be asked now.
func (s *Store) rest() time.Duration {
	if !s.silent.Load() {
		return 0
	}
	return max(0, time.Duration(s.quiet.Load())-time.Since(s.start))
}

// jittered returns d plus a random time of up to d, at most 100 ms.
func jittered(d time.Duration) time.Duration {
	d = max(d, time.Millisecond)
	return d + rand.N(min(d, pause))
}
