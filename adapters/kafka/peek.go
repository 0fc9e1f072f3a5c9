// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardkafka

import (
	"reflect"
	"sync"

	"github.com/IBM/sarama"
)

// sarama has no method for some values that the adapter needs. The adapter reads unexported
// fields by name and exact type. If sarama has changed such a field, the adapter does not find
// it, and goes on without it.

// dyingOf is the channel that closes when sarama closes a claim; nil if it is not found.
func dyingOf(native sarama.ConsumerGroupClaim) <-chan struct{} {
	return signalOf(fieldOf(native, "PartitionConsumer", "dying"))
}

// closedOf is the channel that closes in ConsumerGroup.Close, before its claims are closed;
// nil if it is not found.
func closedOf(native sarama.ConsumerGroupSession) <-chan struct{} {
	return signalOf(fieldOf(native, "parent", "closed"))
}

// signalOf is a field as a channel of empty structs; nil if it has another type.
func signalOf(f reflect.Value) <-chan struct{} {
	if !f.IsValid() || f.Kind() != reflect.Chan || f.Type().ChanDir() != reflect.BothDir ||
		f.Type().Elem().Kind() != reflect.Struct || f.Type().Elem().NumField() > 0 {
		return nil
	}
	return *(*chan struct{})(f.Addr().UnsafePointer())
}

// fieldOf follows fields by name, through interfaces and pointers to structs; invalid if one of
// them is missing.
func fieldOf(of any, names ...string) reflect.Value {
	v := reflect.ValueOf(of)
	for _, name := range names {
		if v.Kind() == reflect.Interface {
			v = v.Elem()
		}
		if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
			return reflect.Value{}
		}
		v = v.Elem().FieldByName(name)
	}
	return v
}

// askedPauses are the pauses that the program asked a group for, by
// ConsumerGroup.Pause and PauseAll. They outlive the group's sessions.
type askedPauses struct {
	lock *sync.Mutex   // of sarama's consumer
	of   reflect.Value // a map of topics to sets of partitions
}

// askedPausesOf finds the pauses in sarama's fields, as [dyingOf] finds its channel; nil if they
// are not found.
func askedPausesOf(native sarama.ConsumerGroupClaim) *askedPauses {
	lock := fieldOf(native, "PartitionConsumer", "consumer", "lock")
	paused := fieldOf(native, "PartitionConsumer", "consumer", "paused")
	if !lock.IsValid() || lock.Type() != reflect.TypeFor[sync.Mutex]() ||
		!paused.IsValid() || paused.Kind() != reflect.Map || paused.Type().Key() != reflect.TypeFor[string]() ||
		paused.Type().Elem().Kind() != reflect.Map || paused.Type().Elem().Key() != reflect.TypeFor[int32]() {
		return nil
	}
	return &askedPauses{(*sync.Mutex)(lock.Addr().UnsafePointer()), paused}
}

func (a *askedPauses) hasLocked(topic string, partition int32) bool {
	partitions := a.of.MapIndex(reflect.ValueOf(topic))
	return partitions.IsValid() && partitions.MapIndex(reflect.ValueOf(partition)).IsValid()
}
