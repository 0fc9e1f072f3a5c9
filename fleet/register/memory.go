// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package register

import (
	"bytes"
	"context"
	"errors"
	"sync"

	"github.com/stormguard-mq/stormguard/internal/registers"
)

// Memory is a [Register] within one process, for tests. The zero value is empty and ready to use.
// It must not be copied.
type Memory struct {
	mu       sync.Mutex
	number   uint64
	document []byte
	away     error
	changed  chan struct{} // closed at the next change; nil while nobody waits
}

var _ Register = (*Memory)(nil)

// SetAway makes all calls fail with err, as if the store were away. nil ends that.
func (m *Memory) SetAway(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.away = err
	m.tellLocked()
}

func (m *Memory) tellLocked() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
	}
}

// Read returns the newest document.
func (m *Memory) Read(ctx context.Context) (number uint64, document []byte, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := errors.Join(ctx.Err(), m.away); err != nil {
		return 0, nil, err
	}
	return m.number, bytes.Clone(m.document), nil
}

// CompareAndSet writes a document. Its outcome is never unknown.
func (m *Memory) CompareAndSet(ctx context.Context, number uint64, document []byte) error {
	if err := Check(number, document); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := errors.Join(ctx.Err(), m.away); err != nil {
		return err
	}
	if m.number != number-1 {
		return &ConflictError{Newest: m.number}
	}
	m.number, m.document = number, bytes.Clone(document)
	m.tellLocked()
	return nil
}

// Watch reports each change.
func (m *Memory) Watch(ctx context.Context, on func(Event)) error {
	return watch(ctx, on, func(ctx context.Context, emit func(uint64, []byte) error) error {
		for {
			m.mu.Lock()
			number, document, away := m.number, bytes.Clone(m.document), m.away
			if m.changed == nil {
				m.changed = make(chan struct{})
			}
			changed := m.changed
			m.mu.Unlock()
			if away != nil {
				return away
			}
			if err := emit(number, document); err != nil {
				return err
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
}

// watch is [registers.Watch] with Events.
func watch(ctx context.Context, on func(Event), session func(context.Context, func(uint64, []byte) error) error) error {
	return registers.Watch(ctx, func(number uint64, document []byte, err error) {
		on(Event{Number: number, Document: document, Err: err})
	}, session)
}
